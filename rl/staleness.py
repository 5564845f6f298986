"""The staleness bound: one policy object admits, checks, evicts and derives the capacity.

The k-th group to be consumed from now on will be consumed by the step with base `head + k // examined`;
it must have started at most alpha versions before. A group that starts now starts at the version which the
engines serve. So it may be admitted while

    unsettled < (admission + 1 - (head - serving)) * examined_per_step

where `unsettled` counts the sealed groups that are still eligible and those in flight (AReaL's rule,
RollArt section 5 "O(alpha * E)"). `admission` is alpha, but in a mode that bounds the start only (`rl.modes`).

Invariants: no knob contradicts another, for there is one number, alpha; lag <= alpha for everything trained
(`check` raises); under alpha = 0 at most one batch plus replacements is admitted per version.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl.errors import StalenessViolation
from rl.ledger import Ledger


@dataclass(frozen=True)
class StalenessPolicy:
    """`alpha` in versions, `groups_per_step` trained by one step, `examined_per_step` looked at for one
    (more than trained where groups without signal are replaced), `steps` the version to stop at, `admission` the
    bound by which groups are started (at most alpha, which it is if left away)."""

    alpha: int
    groups_per_step: int
    examined_per_step: int
    steps: int | None = None
    admission: int = -1

    def __post_init__(self) -> None:
        if self.admission == -1:
            object.__setattr__(self, "admission", self.alpha)
        bounds, sizes = (0, self.admission, self.alpha), (1, self.groups_per_step, self.examined_per_step)
        if sorted(bounds) != list(bounds) or sorted(sizes) != list(sizes):
            raise ValueError(f"impossible staleness policy: {self}")

    def capacity(self, head: int, serving_lag: int) -> int:
        """How many groups may be unsettled, when the engines serve a version `serving_lag` behind `head`."""
        ahead = self.admission + 1 - serving_lag
        if self.steps is not None:
            ahead = min(ahead, self.steps - head)
        return max(0, ahead) * self.examined_per_step

    @property
    def buffer_groups(self) -> int:
        """The most groups that can be unsettled at once."""
        return (self.admission + 1) * self.examined_per_step

    def viable(self, lag: int | None) -> bool:
        """Whether a group of this lag to the coming step's base can still be trained."""
        return lag is not None and lag <= self.alpha

    def floor(self, ledger: Ledger) -> int:
        """The oldest version that can still be trained: where a reader of the buffer starts. Never below the gc floor
        (as alpha alone may be after a rollback): what is trained must be there for a replay."""
        if ledger.head is None:
            return 0
        return max(ledger.gc_floor, ledger.line[max(0, len(ledger.line) - 1 - self.alpha)])

    def oldest_viable(self, ledger: Ledger, base_ahead: int) -> int:
        """The oldest start version that the step with base `head + base_ahead` can still train; a generation
        that started under an older one may end. Where engines are updated when the step on the head has its batch
        already, the next one counts (`base_ahead` 1); else the step on the head is yet to get its batch (0)."""
        if ledger.head is None:
            return 0
        if not 0 <= base_ahead <= self.alpha:
            raise ValueError(f"base_ahead {base_ahead} is not in 0..alpha ({self.alpha})")
        return ledger.line[max(0, len(ledger.line) - 1 - (self.alpha - base_ahead))]

    def check(self, ledger: Ledger, uid: object, version: int) -> int:
        """The lag of a sample in the coming step. Raises StalenessViolation past the bound."""
        lag = ledger.lag(version)
        if lag is None or lag > self.alpha:
            raise StalenessViolation(
                f"group {uid} of version {version} has lag {lag} at version {ledger.head}, "
                f"alpha is {self.alpha}"
            )
        return lag
