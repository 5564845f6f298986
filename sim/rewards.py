"""Rewards: a queue in front of dedicated slots, or functions that are started as they are needed.

Invariants: dedicated slots take work in order of arrival and one at a time; a serverless call waits for nobody, but
pays a cold start when no warm instance is idle.
"""

from __future__ import annotations

import heapq

import numpy as np

from sim.config import RewardSection

Array = np.ndarray


class Rewards:
    """When each reward is there, if it is asked for at a moment and takes some seconds."""

    def __init__(self, section: RewardSection):
        self._section = section
        self._free = [0.0] * section.slots if section.type == "dedicated" else []
        self._idle: list[float] = []
        """Moments at which warm instances became idle, or will: the newest is taken first, as Lambda does."""
        self.busy = 0.0
        """Seconds of work done."""
        self.cold_starts = 0
        self.calls = 0

    def ends(self, asked: Array, work: Array) -> Array:
        """The moments at which the rewards are there; `asked` in seconds, not before those of earlier calls."""
        self.busy += float(work.sum())
        self.calls += len(asked)
        result = np.empty(len(asked))
        for at in np.argsort(asked, kind="stable"):
            result[at] = self._one(float(asked[at]), float(work[at]))
        return result

    def _one(self, asked: float, work: float) -> float:
        if self._section.type == "dedicated":
            end = max(asked, heapq.heappop(self._free)) + work
            heapq.heappush(self._free, end)
            return end
        warm = self._idle and self._idle[0] <= asked
        if warm:
            heapq.heappop(self._idle)
        else:
            self.cold_starts += 1
        end = asked + work + (0.0 if warm else self._section.cold_start)
        heapq.heappush(self._idle, end)
        while len(self._idle) > 1 and self._idle[0] < asked - self._section.keep_warm:
            heapq.heappop(self._idle)
        return end

    def utilisation(self, seconds: float) -> float:
        """Share of the slots' time in which they work; 1 for functions, which are paid by use."""
        if self._section.type == "serverless":
            return 1.0
        return self.busy / (self._section.slots * max(seconds, 1e-9))
