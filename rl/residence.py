"""Whose adapter and optimizer stay in a trainer's memory, where there is room for some only.

Who has been away the longest is the wrong one to give up: tenants come back in turn, so that it is the next. Given up
is who is expected back last, by how long each takes from one step to the next.

Invariants: pure, time is told; nobody is given up while its batch waits, unless all of them wait.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

SMOOTHING = 0.5
"""Share of the newest interval in what is expected of the next."""


@dataclass(slots=True)
class _Rhythm:
    last: float
    """When it was used last."""
    interval: float | None = None
    """Expected seconds between two uses; None until it was used twice."""


class Residence:
    """Follows who is used when."""

    def __init__(self) -> None:
        self._rhythms: dict[str, _Rhythm] = {}

    def used(self, tenant: str, now: float) -> None:
        """Its step ended now."""
        rhythm = self._rhythms.get(tenant)
        if rhythm is None:
            self._rhythms[tenant] = _Rhythm(now)
            return
        seconds = now - rhythm.last
        before = seconds if rhythm.interval is None else rhythm.interval
        rhythm.interval, rhythm.last = before + SMOOTHING * (seconds - before), now

    def forget(self, tenant: str) -> None:
        """It left, and does not come back as who it was."""
        self._rhythms.pop(tenant, None)

    def victim(self, held: Collection[str], waiting: Collection[str], now: float) -> str:
        """Who of those `held` is given up. Raises ValueError where nobody is held."""
        idle = [tenant for tenant in held if tenant not in waiting] or list(held)
        return max(sorted(idle), key=lambda tenant: self._back(tenant, now))

    def _back(self, tenant: str, now: float) -> tuple[float, float]:
        """When it is expected, not before now; of those without a rhythm the one that was here last is the last."""
        rhythm = self._rhythms.get(tenant)
        if rhythm is None:
            return now, now
        known = [r.interval for r in self._rhythms.values() if r.interval is not None]
        usual = sum(known) / len(known) if known else 0.0
        interval = usual if rhythm.interval is None else rhythm.interval
        return max(now, rhythm.last + interval), rhythm.last
