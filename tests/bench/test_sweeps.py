"""Each alternative takes part at its best, and what was tried is not tried again."""

import json
from importlib import metadata
from typing import Any

import pytest

from residual_ebm.bench import sweeps
from residual_ebm.bench.setting import Setting
from residual_ebm.bench.sweeps import Sweeps
from residual_ebm.bench.workers import Reading, Spec
from residual_ebm.progress import QUIET


class Machine:
    """Candidates whose rates are known; it notes who was asked, and how."""

    def __init__(self, rates: dict[str, float | None]) -> None:
        self.rates = rates
        self.asked: list[str] = []

    def alternate(self, specs: list[Spec], repeats: int, **_: Any) -> list[Reading]:
        (spec,) = specs
        assert repeats == 1
        self.asked.append(spec.name)
        rate, units = self.rates[spec.name], spec.arguments["size"]
        if rate is None:
            return [Reading(spec.name, units, error="died")]
        return [Reading(spec.name, units, first_seconds=1.0, seconds=[units / rate])]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine({})
    monkeypatch.setattr(sweeps, "alternate", made.alternate)
    return made


def ladder(*names: str, **arguments: Any) -> list[Spec]:
    return [
        Spec(name, "nowhere", {"size": 16 * 2**number, **arguments})
        for number, name in enumerate(names)
    ]


def test_the_quickest_of_all_ladders(machine: Machine) -> None:
    machine.rates = {"a": 5.0, "b": 9.0, "c": 7.0, "d": 20.0, "e": None}
    best, tried = Sweeps(Setting(), QUIET).best("x", [ladder("a", "b", "c"), ladder("d", "e")])
    assert best.name == "d"
    assert [row["name"] for row in tried] == ["a", "b", "c", "d", "e"]
    assert [row["rate"] for row in tried] == [5.0, 9.0, 7.0, 20.0, None]
    assert tried[-1]["error"] == "died"


@pytest.mark.parametrize(
    "rates", [(5.0, 4.0, 6.0, 5.0, 3.0, 99.0), (1.0, 1.1, 2.0, 2.09, 2.08, 99)]
)
def test_a_ladder_is_left_after_two_steps_in_vain(
    machine: Machine, rates: tuple[float, ...]
) -> None:
    machine.rates = dict(zip("abcdef", rates, strict=True))
    Sweeps(Setting(), QUIET).best("x", [ladder(*"abcdef")])
    assert machine.asked == list("abcde")


def test_of_settings_as_good_the_smallest(machine: Machine) -> None:
    machine.rates = {"a": 5.0, "b": 9.9, "c": 10.0}
    best, _ = Sweeps(Setting(), QUIET).best("x", [ladder("a", "b", "c")])
    assert best.name == "b"


def test_ladders_that_one_turn_does_not_tell_apart_contend(machine: Machine) -> None:
    machine.rates = {"a": 5.0, "b": 8.9, "c": 9.0, "d": 8.7, "e": 10.0, "f": None}
    ladders = [ladder("a", "b", "c"), ladder("d"), ladder("e"), ladder("f")]
    contenders, tried = Sweeps(Setting(), QUIET).contenders("x", ladders)
    assert [spec.name for spec in contenders] == ["b", "e"]
    assert [row["name"] for row in tried] == machine.asked == list("abcdef")


def test_where_all_fail_one_says_why(machine: Machine) -> None:
    machine.rates = {"a": None, "b": None}
    contenders, tried = Sweeps(Setting(), QUIET).contenders("x", [ladder("a"), ladder("b")])
    assert [spec.name for spec in contenders] == ["a"]
    assert machine.asked == ["a", "b"]
    assert [row["error"] for row in tried] == ["died", "died"]


def test_what_is_known_is_not_tried_again_and_is_kept_at_once(machine: Machine) -> None:
    machine.rates = {"a": 5.0, "b": 9.0}
    known: dict[str, Any] = {}
    kept: list[int] = []
    first = Sweeps(Setting(), QUIET, known, lambda: kept.append(len(known)))
    first.best("x", [ladder("a", "b")])
    assert kept == [1, 2]
    machine.rates = {"c": 1.0}
    best, tried = Sweeps(Setting(), QUIET, known).best("x", [ladder("a", "b", "c")])
    assert best.name == "b"
    assert machine.asked == ["a", "b", "c"]
    assert len(tried) == 3
    machine.rates = {"a": 1.0}
    Sweeps(Setting(), QUIET, known).best("y", [ladder("a")])
    assert machine.asked[-1] == "a", "another benchmark has sweeps of its own"


def test_what_was_tried_otherwise_or_elsewhere_is_tried_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.rates = {"a": 5.0}
    known: dict[str, Any] = {}
    Sweeps(Setting(), QUIET, known).best("x", [ladder("a", sizes=(1, 2))])
    known = json.loads(json.dumps(known))
    Sweeps(Setting(), QUIET, known).best("x", [ladder("a", sizes=(1, 2))])
    assert machine.asked == ["a"]
    Sweeps(Setting(), QUIET, known).best("x", [ladder("a", sizes=(1, 3))])
    assert machine.asked == ["a", "a"]
    monkeypatch.setattr(sweeps, "versions", lambda: {"processor": "another"})
    Sweeps(Setting(), QUIET, known).best("x", [ladder("a", sizes=(1, 3))])
    assert machine.asked == ["a", "a", "a"]
    (spec,) = ladder("a", sizes=(1, 3))
    for keeps_memory in (True, False, False):
        Sweeps(Setting(), QUIET, known).best("x", [[spec._replace(keeps_memory=keeps_memory)]])
    assert machine.asked == ["a", "a", "a", "a"]


def test_another_version_of_an_engine_is_tried_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.rates = {"a": 5.0}
    known: dict[str, Any] = {}
    spec = Spec("a", "residual_ebm.bench.engines:llama_cpp", {"size": 1})
    for version, asked in (("1", 1), ("1", 1), ("2", 2)):
        monkeypatch.setattr(metadata, "version", lambda _name, version=version: version)
        Sweeps(Setting(), QUIET, known).best("x", [[spec]])
        assert len(machine.asked) == asked
    assert known["x: a"]["versions"]["llama-cpp-python"] == "2"


def test_what_failed_is_tried_again(machine: Machine) -> None:
    known: dict[str, Any] = {}
    for rate in (None, 3.0, 4.0):
        machine.rates = {"a": rate}
        _, (row,) = Sweeps(Setting(), QUIET, known).best("x", [ladder("a")])
    assert machine.asked == ["a", "a"]
    assert row["rate"] == 3.0
    assert row["error"] is None


def test_nothing_runs_at_all(machine: Machine) -> None:
    """The first of those that failed is taken, and says why."""
    machine.rates = {"a": None, "b": None}
    best, _ = Sweeps(Setting(), QUIET).best("x", [ladder("a", "b")])
    assert best.name == "a"
