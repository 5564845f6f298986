"""Rewards: a queue in front of dedicated slots, or functions that are started as they are needed.

Invariants: dedicated slots take work in order of arrival and one at a time; a serverless call waits for nobody, but
pays a cold start when no warm instance is idle. Of warm ones that which has been idle longest is taken.
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
        self._idle = np.zeros(0)
        """Moments at which warm instances became idle, or will, in order."""
        self.busy = 0.0
        """Seconds of work done."""
        self.cold_starts = 0
        self.calls = 0

    def ends(self, asked: Array, work: Array) -> Array:
        """The moments at which the rewards are there; `asked` in seconds, not before those of earlier calls."""
        self.busy += float(work.sum())
        self.calls += len(asked)
        order = np.argsort(asked, kind="stable")
        result = np.empty(len(asked))
        queue = self._slots if self._section.type == "dedicated" else self._functions
        result[order] = queue(asked[order], work[order])
        return result

    def _slots(self, asked: Array, work: Array) -> list[float]:
        """One after another to the first slot that is free."""
        ends = []
        for begin, seconds in zip(asked.tolist(), work.tolist(), strict=True):
            ends.append(max(begin, heapq.heappop(self._free)) + seconds)
            heapq.heappush(self._free, ends[-1])
        return ends

    def _functions(self, asked: Array, work: Array) -> Array:
        """Each to an instance that was idle before this call, as long as there is one; else to a new one."""
        if not len(asked):
            return asked
        self._idle = self._idle[np.searchsorted(self._idle, asked[0] - self._section.keep_warm) :]
        # Of those asked up to here at most so many found an instance as were idle, and at most one more than before.
        number = np.arange(len(asked))
        idle = np.searchsorted(self._idle, asked, side="right")
        warm = number + np.minimum(1, np.minimum.accumulate(idle - number))
        found = np.diff(warm, prepend=0) > 0
        self.cold_starts += len(asked) - int(warm[-1])
        ends: Array = asked + work + np.where(found, 0.0, self._section.cold_start)
        self._idle = np.sort(np.concatenate([self._idle[int(warm[-1]) :], ends]), kind="stable")
        return ends

    def utilisation(self, seconds: float) -> float:
        """Share of the slots' time in which they work; 1 for functions, which are paid by use."""
        if self._section.type == "serverless":
            return 1.0
        return self.busy / (self._section.slots * max(seconds, 1e-9))
