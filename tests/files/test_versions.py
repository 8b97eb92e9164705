"""A processor is called by all that tells it from others of its name."""

import platform
from pathlib import Path

import pytest

from residual_ebm.files import versions

CORE = (
    "processor\t: {}\nvendor_id\t: Some\ncpu family\t: {}\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n"
)
ELSEWHERE = "processor\t: 0\nBogoMIPS\t: 100.00\nFeatures\t: fp asimd\n"


@pytest.mark.parametrize(
    ("said", "name"),
    [
        (CORE.format(0, 25) + "\n" + CORE.format(1, 99), "AMD EPYC, cpu family 25, model 2"),
        ("model name\t: A: processor\n", "A: processor"),
        (ELSEWHERE, platform.processor()),
        (None, platform.processor()),
    ],
    ids=["several cores", "name alone", "no name", "no file"],
)
def test_processors_of_one_name_are_told_apart(
    said: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if said is not None:
        (tmp_path / "cpuinfo").write_text(said)
    monkeypatch.setattr(versions, "_PROCESSORS", tmp_path / "cpuinfo")
    assert versions.versions()["processor"] == name
