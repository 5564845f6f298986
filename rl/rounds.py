"""Synchronous rounds of many jobs: all roll out one version each, and nobody begins the next before all trained it.

Invariants
- Within a round a job rolls out the one version that it had when the round began, and no other.
- A job that comes in the middle of a round begins with the next one; one that is over, or left, holds up nobody.
- Pure.
"""

from __future__ import annotations

from collections.abc import Mapping


class Rounds:
    """Of one service."""

    def __init__(self) -> None:
        self._version: dict[str, int | None] = {}
        """What each job rolls out in this round; None for one that waits for the next."""

    def look(self, serving: Mapping[str, int | None]) -> bool:
        """The versions that are served now, of the jobs that are not over; None before the first one. Once every job
        has another than in this round, the next one begins; whether one did."""
        if all(version is not None and version != self._version.get(job) for job, version in serving.items()):
            self._version = dict(serving)
            return True
        self._version |= dict.fromkeys(serving.keys() - self._version.keys())
        return False

    def may(self, job: str, serving: int | None) -> bool:
        """Whether a job may start what it rolls out under this version."""
        return serving is not None and self._version.get(job) == serving
