"""All predictions beside the published numbers, with their errors.

Invariant: every row of `rows` is predicted, fitted ones too; what counts is the share of rows that were *not* fitted
which lie within `GOAL`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sim.validation import parts, systems
from sim.validation.rows import GOAL, ROWS, Row
from sim.validation.tenants import tenants

Experiment = Callable[[], Mapping[str, float]]

QUICK: tuple[Experiment, ...] = (
    parts.weights, parts.rewards, parts.redundancy, parts.latency_spread, parts.prefill_decode, parts.swe_step, tenants,
)  # fmt: skip
"""Seconds each."""
WHOLE: tuple[Experiment, ...] = (
    *QUICK, parts.affinity, systems.whole_chain, systems.scaling, systems.mixes, systems.bounds, systems.production,
)  # fmt: skip


@dataclass(frozen=True)
class Checked:
    """One row with its prediction."""

    row: Row
    predicted: float

    @property
    def error(self) -> float:
        return self.row.error(self.predicted)

    @property
    def right(self) -> bool:
        return abs(self.error) <= GOAL

    def as_json(self) -> dict[str, Any]:
        return asdict(self.row) | {"predicted": self.predicted, "error": self.error, "right": self.right}

    @property
    def published(self) -> str:
        row = self.row
        return f"{row.low:.4g}" if row.low == row.high else f"{row.low:.4g} to {row.high:.4g}"

    def __str__(self) -> str:
        row = self.row
        kind = "fitted" if row.fitted else "right" if self.right else "OFF"
        return f"{row.name:50s} {self.published:>14s} {self.predicted:9.4g} {row.unit:6s} {self.error:+7.1%}  {kind}"


def check(experiments: Iterable[Experiment] = WHOLE) -> list[Checked]:
    """The rows that these experiments predict, in the order of `ROWS`."""
    predicted: dict[str, float] = {}
    for experiment in experiments:
        predicted |= experiment()
    return [Checked(row, predicted[row.name]) for row in ROWS if row.name in predicted]


def share_right(checked: Iterable[Checked]) -> float:
    """Of the rows that were not fitted, those within `GOAL`."""
    free = [c for c in checked if c.row.fitted is None]
    return sum(c.right for c in free) / max(1, len(free))
