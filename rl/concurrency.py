"""How many trajectories may be in flight at once, on engines whose load is seen from outside.

A trajectory spends a part of its time in its environment, so more of them than the engines have slots keep the slots
full; how many more depends on the environments and changes with the tenants. So it is found by trying:

    keys and values do not fit (something was preempted, or their room is nearly full)   fewer, by a quarter
    a whole batch waits behind the one that runs                                          fewer, by an eighth
    all that may be are in flight, and little waits                                       more, by an eighth
    the same, before anything ever waited, with ample room for keys and values            twice as many

Groups start whole, so all that may be are in flight also where the next group would not fit.

Invariants: never below the largest group that is to start, so that it can, and never above `most`; equal looks give
equal answers. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

FULL = 0.95
"""Share of the room for keys and values above which it counts as full."""
LITTLE = 0.25
"""Share of the engines' slots that may wait while more is started."""
AMPLE = 0.5
"""Share of the room for keys and values up to which as much again would fit."""
USED = 0.9
"""Share of the present limit from which on more of it could be of use."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is seen of the engines, all together."""

    in_flight: int
    """Trajectories, those in their environments included."""
    waiting: int
    """Generations that no engine has begun."""
    preempted: int
    """Generations that lost their place, since the engines' start."""
    kv_usage: float
    """Share of the room for keys and values that is taken, of the fullest engine."""


class Concurrency:
    """The limit, from look to look. `slots`: sequences that all engines decode together."""

    def __init__(self, slots: int, least: int, most: int):
        """Raises ValueError for a least above the most."""
        if not 1 <= least <= most or slots < 1:
            raise ValueError(f"from {least} to {most} trajectories on {slots} slots is not possible")
        self._slots, self._least, self._most = slots, least, most
        self._together = least
        self.limit = min(most, max(least, slots))
        self._preempted: int | None = None
        self._waited = False
        """Whether ever more than a little waited, or something did not fit."""

    def look(self, load: Load) -> int:
        """The limit from now on."""
        known, self._preempted = self._preempted, load.preempted
        unfit = (known is not None and load.preempted > known) or load.kv_usage > FULL
        self._waited = self._waited or unfit or load.waiting > LITTLE * self._slots
        if unfit:
            wanted = self.limit - max(1, self.limit // 4)
        elif load.waiting > self._slots:
            wanted = self.limit - max(1, self.limit // 8)
        elif load.waiting <= LITTLE * self._slots and (
            load.in_flight >= USED * self.limit or load.in_flight + self._together > self.limit
        ):
            first = not self._waited and load.kv_usage <= AMPLE
            wanted = 2 * self.limit if first else self.limit + max(1, self.limit // 8)
        else:
            wanted = self.limit
        self.limit = min(self._most, max(self._least, wanted))
        return self.limit

    def need(self, together: int) -> None:
        """The largest group that is to start now has so many."""
        self._least = self._together = min(self._most, together)
        self.limit = max(self.limit, self._least)

    def resize(self, most: int) -> None:
        """From now on at most so many."""
        self._most = max(1, most)
        self._least = min(self._least, self._most)
        self.limit = min(self.limit, self._most)
