"""How rollout and training relate in time: the modes of one flow.

    sync        rollout, then training; environments are stepped together, rewards wait for the whole batch
    sync_plus   rollout, then training; every trajectory goes its own way, and so does its reward
    one_off     the next batch is rolled out while one trains; both wait for each other at every step
    areal       no step waits for the rollout of a batch; the bound is checked when a trajectory starts, and not again
    rollart     as areal, and nothing older than the bound is ever trained: a step waits for what it would make too old
    six_steps   rollart in the order that the paper prints, which with alpha 1 is one_off

    order of a step, and when engines get the version v that a step made:
    alternates (alpha 0)   update v -> rollout -> get_batch -> train -> commit
    lazy                   commit v -> get_batch -> update v | train      (the engines finish the batch first)
    eager                  commit v -> update v                           (beside get_batch and train)

Everything else is the same in all of them (store, engine, trainer, placement, exactly-once), so that they compare: what
the others leave out of `rollart` is what they are measured for.

What a mode costs, with L the time of a batch's slowest group, T of training and W the work of the busiest stage: a step
takes at least L + T where both alternate, max(L / alpha, T, W) in the six steps, and max((L + T) / (alpha + 1), T, W)
in the eager order, since what starts under v may be trained until alpha steps after v. Where a step does not wait for
what it would make too old, but has it drawn again (`staleness.late`), L is about the mean group, and W is more.

Invariants: pure; a mode and alpha never contradict each other (`alphas`); what may be trained is decided by
`rl.staleness` alone, from the numbers that `bound` gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ModeName = Literal["sync", "sync_plus", "one_off", "areal", "rollart", "six_steps"]

UNBOUNDED = 16
"""Lag up to which `areal` trains: the largest alpha that there is. How far it went is in every step's record."""


@dataclass(frozen=True)
class Mode:
    """One mode. `alphas` are the least and the largest alpha that it takes."""

    name: ModeName
    alphas: tuple[int, int]
    lockstep: bool = False
    """All environments of a batch take each turn together, and no reward is computed before all are done."""
    eager: bool = False
    """Engines get a version as soon as it is committed, and not only when the next batch is complete."""
    bounded: bool = True
    """Whether the bound holds beyond the start of a trajectory."""

    @property
    def alternates(self) -> bool:
        """Whether rollout and training take turns."""
        return self.alphas == (0, 0)

    @property
    def waits(self) -> bool:
        """Whether a step waits for what it would make too old."""
        return self.bounded and not self.alternates

    def bound(self, alpha: int) -> int:
        """The largest lag that may be trained."""
        return alpha if self.bounded else max(alpha, UNBOUNDED)

    def base_ahead(self, alpha: int) -> int:
        """How many steps ahead of the head the base of the next batch is when engines get the head: 1 where they get
        it after the batch on the head."""
        return 0 if self.eager or self.alternates else min(1, alpha)

    def refuse(self, alpha: int) -> str | None:
        """Why this mode can not run with this alpha."""
        least, most = self.alphas
        if least <= alpha <= most:
            return None
        fits = f"{least}" if least == most else f"{least} to {most}"
        return f"staleness.mode {self.name} takes alpha {fits}, not {alpha}; leave alpha away or choose another mode"


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("sync", (0, 0), lockstep=True),
        Mode("sync_plus", (0, 0)),
        Mode("one_off", (1, 1)),
        Mode("areal", (1, UNBOUNDED), eager=True, bounded=False),
        Mode("rollart", (1, UNBOUNDED), eager=True),
        Mode("six_steps", (1, UNBOUNDED)),
    )
}


def default_mode(alpha: int) -> ModeName:
    """The mode of a run that names none."""
    return "rollart" if alpha else "sync_plus"
