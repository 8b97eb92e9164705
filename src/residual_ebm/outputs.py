"""What a command gives back: data for `--json`, and how it is shown to a person."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Output:
    data: Any
    show: Callable[[], None]


def lines_output(data: Any, lines: list[str]) -> Output:
    return Output(data, lambda: print("\n".join(lines)))
