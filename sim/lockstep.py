"""Trajectories that take their turns together, as environments in one batch do.

Invariants: a run's trajectories go on only when all of them wait, all from the moment at which the last one was ready;
other runs are not held up.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sim.phases import FREE, QUEUED, SCORE, WAIT_READ
from sim.slots import Slots

Array = np.ndarray


class Lockstep:
    """The runs for which that is so."""

    def __init__(self, slots: Slots, runs: Iterable[int]):
        self._slots, self._runs = slots, list(runs)

    def hold(self, slots: Array, kind: int) -> Array:
        """Make those of these runs wait in the phase `kind`; the others."""
        if not self._runs:
            return slots
        together = np.isin(self._slots.run[slots], self._runs)
        self._slots.phase[slots[together]] = kind
        return slots[~together]

    def released(self, kind: int) -> list[Array]:
        """Of each run of which nothing moves, those that wait in the phase `kind`."""
        s, found = self._slots, []
        for run in self._runs:
            ours = np.flatnonzero((s.run == run) & (s.phase != FREE))
            phase = s.phase[ours]
            waiting = ours[phase == kind]
            moving = ((phase < WAIT_READ) | (phase == QUEUED)) & (phase != SCORE)
            if len(waiting) and not moving.any():
                s.moment[waiting] = s.moment[waiting].max()
                found.append(waiting)
        return found
