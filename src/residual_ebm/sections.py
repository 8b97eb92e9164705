"""What every part of a recipe has in common: closed, typed, and refused in one line."""

import difflib
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

TRAINING_SUFFIX = ".training"  # of the folder a training resumes from, beside its result


def refusal(remedy: str, *, at: str | None = None, value: object = None) -> PydanticCustomError:
    """A fault found by a check of ours; `at` is the field below the section that was checked."""
    context = {"remedy": remedy, "at": at, "value": value}
    return PydanticCustomError("refused", "{remedy}", context)


def _check_file_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise refusal("names a folder: use letters, digits, '.', '_' and '-', e.g. base-lm")
    if name.endswith(TRAINING_SUFFIX):
        raise refusal(f"{TRAINING_SUFFIX} marks a training under way; end the name otherwise")
    return name


Name = Annotated[str, AfterValidator(_check_file_name)]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the recipe; unknown keys are refused with the nearest known one."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    raise refusal(_nearest(str(key), cls), at=str(key), value=data[key])
        return data


def _nearest(key: str, section: type[BaseModel]) -> str:
    close = difflib.get_close_matches(key, section.model_fields, n=1, cutoff=0.4)
    known = ", ".join(section.model_fields)
    return f"unknown key; did you mean {close[0]}?" if close else f"unknown key; known are {known}"
