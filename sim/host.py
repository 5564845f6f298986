"""What a run and the cluster tell each other: groups in flight, steps made, and what the cluster does on request.

Invariant: a run knows the cluster only as a `Host`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rl.trajectory import Uid
from sim.config import DomainWork

if TYPE_CHECKING:
    from sim.run import Run


@dataclass(slots=True)
class Flight:
    """A group in flight."""

    uid: Uid
    version: int
    domain: DomainWork
    problem: float
    """How much longer than usual the responses to its problem are."""
    began: float
    failed: set[int] = field(default_factory=set)
    retries: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step, in seconds of the virtual clock."""

    version: int
    asked: float
    """When the trainer was ready for a batch."""
    batch: float
    trained: float
    committed: float
    tokens: float
    trajectories: int
    lag: float
    """Mean over the batch."""


class Host(Protocol):
    """What the cluster does for a run."""

    @property
    def now(self) -> float: ...
    def grant(self, run: Run, uids: list[Uid]) -> list[Uid]: ...
    def place(self, run: Run, flights: list[Flight]) -> None: ...
    def end(self, run: Run, uids: Iterable[Uid], playing: bool) -> None: ...
    def train(self, run: Run, tokens: float, squares: float) -> None: ...
    def push(self, run: Run) -> None: ...
    def swap(self, run: Run) -> None: ...
