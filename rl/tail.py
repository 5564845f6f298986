"""What is observed of members, and how many spares follow from it (`rl.redundancy`).

A spare that is started ahead costs a whole trajectory; without it a failed member is started again, and its group ends
later by about the time of one. Whether that holds up the step depends on the tail: where all trajectories take about as
long it does, nearly always; where few are much longer than the rest the step waits for those anyway. So a spare is
started where it makes the expected time of a batch shorter by more than its share of the work.

Invariants: pure; the newest `WINDOW` tries count; before `LEAST` of them nothing is started in excess; what a failure
was is not asked, but a stale trajectory is none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rl.redundancy import spares_worth

WINDOW = 2000
LEAST = 50
QUANTILES = 64
"""Durations that stand for all that were seen: enough to see one long one among the members of a step."""
OFTEN = 500
"""Tries after which it is reckoned anew, which takes as long as some ten of them."""


class Tail:
    """Durations and failures of the newest tries. Not thread-safe."""

    def __init__(self) -> None:
        self._groups: deque[tuple[int, int]] = deque()
        self._durations: deque[float] = deque(maxlen=WINDOW)
        self._tries = self._failures = self._since = 0
        self._found: dict[tuple[int, int], int] = {}

    def note(self, tries: int, failures: int, durations: Sequence[float]) -> None:
        """One group that ended: how many tries of members it started, how many failed, and the seconds of those that
        did not."""
        self._groups.append((tries, failures))
        self._durations.extend(durations)
        self._tries, self._failures, self._since = self._tries + tries, self._failures + failures, self._since + tries
        while self._tries > WINDOW and len(self._groups) > 1:
            old_tries, old_failures = self._groups.popleft()
            self._tries, self._failures = self._tries - old_tries, self._failures - old_failures
        if self._since >= OFTEN:
            self._since = 0
            self._found.clear()

    @property
    def failure_rate(self) -> float:
        return self._failures / self._tries if self._tries >= LEAST else 0.0

    def spares(self, size: int, groups: int) -> int:
        """How many members to start beyond `size`, in steps of so many groups: as many again at most."""
        if not self.failure_rate or not self._durations:
            return 0
        if (size, groups) not in self._found:
            ordered = sorted(self._durations)
            seen = [ordered[int((at + 0.5) * len(ordered) / QUANTILES)] for at in range(QUANTILES)]
            self._found[size, groups] = spares_worth(seen, size, self.failure_rate, groups)
        return self._found[size, groups]
