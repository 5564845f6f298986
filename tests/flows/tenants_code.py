"""What tenants of the tests bring along."""

from __future__ import annotations

from rewards.protocol import TrajectoryView


def raises(view: TrajectoryView) -> dict[str, float]:
    raise LookupError("no answer sheet for this one")
