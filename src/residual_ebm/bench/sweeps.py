"""Alternatives at their best: settings are tried one after the other, and the best takes part.

What was tried is part of the result, and is kept as soon as it is known: sweeps take longer than
the comparison, and go on after an interruption where they were. What was tried with other
arguments, on another processor, with other libraries or memory is tried again.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from residual_ebm.bench.engines import versions_of
from residual_ebm.bench.setting import Setting
from residual_ebm.bench.workers import Reading, Spec, alternate
from residual_ebm.files.versions import versions
from residual_ebm.progress import Progress

_STEPS_IN_VAIN = 2  # a sweep goes no further after so many
_WORTH_A_STEP = 1.05  # times the best rate so far
_AS_GOOD = 0.98  # of the best rate: the smallest such setting is taken, its turns are shorter
# Of the best rate: one turn does not tell which is the quicker. A setting that had 183 tokens/s by
# one turn had 161 in five rounds.
_CLOSE = 0.88


def reading_row(reading: Reading) -> dict[str, Any]:
    row = asdict(reading)
    row["median_seconds"] = statistics.median(reading.seconds) if reading.seconds else None
    row["rate"] = reading.rate
    return row


@dataclass
class Sweeps:
    setting: Setting
    progress: Progress
    known: dict[str, dict[str, Any]] = field(default_factory=dict)  # rows by candidate
    keep: Callable[[], None] = lambda: None

    def best(
        self, name: str, ladders: Sequence[Sequence[Spec]]
    ) -> tuple[Spec, list[dict[str, Any]]]:
        """The quickest of some specs, by one turn, and what those tried did.

        A ladder is one setting in rising order; it is climbed until two steps in a row are hardly
        quicker than the best of it so far, or slower.
        """
        tried: list[tuple[Spec, dict[str, Any]]] = []
        for ladder in ladders:
            best, in_vain = 0.0, 0
            for spec in ladder:
                row = self._row(name, spec)
                tried.append((spec, row))
                rate = row["rate"] or 0.0
                in_vain = 0 if rate > _WORTH_A_STEP * best else in_vain + 1
                best = max(best, rate)
                if in_vain == _STEPS_IN_VAIN:
                    break
        top = max(row["rate"] or 0.0 for _, row in tried)
        as_good = [pair for pair in tried if (pair[1]["rate"] or 0.0) >= _AS_GOOD * top]
        quickest, _ = min(as_good, key=lambda pair: int(pair[1]["units"]))
        return quickest, [row for _, row in tried]

    def contenders(
        self, name: str, ladders: Sequence[Sequence[Spec]]
    ) -> tuple[list[Spec], list[dict[str, Any]]]:
        """The best of every ladder that comes close to the quickest, and what those tried did."""
        found = [self.best(name, [ladder]) for ladder in ladders]
        rows = [row for _, swept in found for row in swept]
        rates = {row["name"]: row["rate"] or 0.0 for row in rows}
        top = max(rates.values())
        if top == 0.0:
            return [found[0][0]], rows  # which says what hinders it
        return [spec for spec, _ in found if rates[spec.name] >= _CLOSE * top], rows

    def _row(self, name: str, spec: Spec) -> dict[str, Any]:
        key = f"{name}: {spec.name}"
        # As it will be read again.
        made_with = {**versions(), **versions_of(spec.factory)}
        asked = json.loads(
            json.dumps(
                {
                    "arguments": spec.arguments,
                    "versions": made_with,
                    "keeps_memory": spec.keeps_memory,
                }
            )
        )
        known = self.known.get(key, {})
        # What failed may have failed for want of memory or minutes.
        if known.get("error") or {part: known.get(part) for part in asked} != asked:
            (reading,) = alternate(
                [spec],
                1,
                timeout=self.setting.timeout,
                label=key,
                progress=self.progress,
            )
            self.known[key] = {**reading_row(reading), **asked}
            self.keep()
        return self.known[key]
