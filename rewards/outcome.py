"""The environment's own verdict: the sum of the rewards it gave along the episode."""

from __future__ import annotations

from rewards.protocol import TrajectoryView


def outcome(view: TrajectoryView) -> dict[str, float]:
    """One part, `outcome`. An episode that was cut off keeps what it had earned by then."""
    return {"outcome": view.environment_reward}
