"""The table of trajectories: one row, a slot, for each that plays.

Invariants: a row is in use from `take` until `give_back`; a free row is in phase FREE, ends at no moment, and is in no
group; rows are taken in the same order in equal runs.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from sim.phases import FREE

Array = np.ndarray
NEVER = np.inf


class Slots:
    """Columns over slots."""

    phase: Array
    group: Array
    member: Array
    run: Array
    domain: Array
    engine: Array
    """The engine that answers its turns."""
    reader: Array
    """The engine that reads its prompts: its own, or one of a prefill pool."""
    turn: Array
    """Turns that it has taken."""
    turns: Array
    """Turns that it will take."""
    ahead: Array
    """Turns that it takes as one now."""
    fails_at: Array
    until: Array
    """When its phase ends, where that is known; else NEVER."""
    moment: Array
    """When it became ready for what it waits for."""
    left: Array
    """Tokens to decode in this turn, from when it was last read on."""
    goal: Array
    """What its engine has given to each sequence when these are there."""
    length: Array
    context: Array
    """Tokens that it had when it was last read."""
    cold: Array
    """Whether its engine has nothing of it in the cache."""

    COLUMNS: ClassVar[dict[str, type]] = {
        "phase": np.int8, "group": np.int64, "member": np.int64, "run": np.int64, "domain": np.int64,
        "engine": np.int64, "reader": np.int64, "turn": np.int64, "turns": np.int64, "ahead": np.int64,
        "fails_at": np.int64, "until": float, "moment": float, "left": float, "goal": float, "length": float,
        "context": float, "cold": bool,
    }  # fmt: skip

    def __init__(self, count: int):
        for name, kind in self.COLUMNS.items():
            setattr(self, name, np.zeros(0, kind))
        self._free: list[int] = []
        self._grow(count)

    def take(self, count: int) -> Array:
        """Rows for so many newcomers."""
        if count > len(self._free):
            self._grow(max(count, len(self.phase)))
        slots = np.array(self._free[: -count - 1 : -1], np.int64)
        del self._free[len(self._free) - count :]
        return slots

    def give_back(self, slots: Array) -> None:
        self.phase[slots] = FREE
        self.until[slots] = NEVER
        self._free.extend(slots[::-1].tolist())

    def _grow(self, more: int) -> None:
        had = len(self.phase)
        for name, kind in self.COLUMNS.items():
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(more, kind)]))
        self.until[had:] = NEVER
        self._free[:0] = range(had + more - 1, had - 1, -1)
