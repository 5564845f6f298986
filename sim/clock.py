"""Moments at which something is due, in order.

Invariant: what is due at one moment happens in the order in which it was asked for.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count


class Agenda:
    """Calls at moments to come, in seconds."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, moment: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (moment, next(self._order), call))

    @property
    def next(self) -> float:
        """The next moment; infinite when there is none."""
        return self._due[0][0] if self._due else math.inf

    def until(self, now: float) -> bool:
        """Make every call that is due by `now`, those that they ask for included; whether there was one."""
        any_due = False
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
            any_due = True
        return any_due
