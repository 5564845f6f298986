"""What is observed of members, and how many spares follow from it (`rl.redundancy`).

A spare that is started ahead costs a whole trajectory; without it a failed member is started again, and its group ends
later by about the time of one. So a spare pays where failures are so frequent that most groups would have one, and not
before: with `ASSURANCE` 0.9 and groups of 8 none is started up to a failure rate of 1.3 %, and one up to 6 %.

Invariants: pure; the newest `WINDOW` tries count; before `LEAST` of them nothing is started in excess; what a failure
was is not asked, but a stale trajectory is none.
"""

from __future__ import annotations

from collections import deque

from rl.redundancy import spares_needed

ASSURANCE = 0.9
"""Probability with which no member has to be started again."""
WINDOW = 2000
LEAST = 50


class Tail:
    """Failures of the newest tries. Not thread-safe."""

    def __init__(self) -> None:
        self._groups: deque[tuple[int, int]] = deque()
        self._tries = self._failures = 0

    def note(self, tries: int, failures: int) -> None:
        """One group that ended: how many tries of members it started, and how many failed."""
        self._groups.append((tries, failures))
        self._tries, self._failures = self._tries + tries, self._failures + failures
        while self._tries > WINDOW and len(self._groups) > 1:
            tries, failures = self._groups.popleft()
            self._tries, self._failures = self._tries - tries, self._failures - failures

    @property
    def failure_rate(self) -> float:
        return self._failures / self._tries if self._tries >= LEAST else 0.0

    def spares(self, size: int) -> int:
        """How many members to start beyond `size`: never more than as many again."""
        return spares_needed(size, self.failure_rate, ASSURANCE, most=size)
