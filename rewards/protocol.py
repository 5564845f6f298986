"""What a reward is: a stateless function from a view of one finished trajectory to named parts.

Invariants: no I/O state between calls; equal views give equal parts; parts are finite numbers; a reward that
can not be computed raises and is never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl.trajectory import Message, Problem, Status, Trajectory


@dataclass(frozen=True)
class TrajectoryView:
    """What a reward function may see."""

    problem: Problem
    messages: Sequence[Message]
    status: Status
    turns: int
    generated_tokens: int
    environment_reward: float
    info: dict[str, Any]

    @classmethod
    def of(cls, t: Trajectory) -> TrajectoryView:
        return cls(t.problem, t.messages, t.status, t.turns, t.generated_tokens, t.environment_reward, t.info)


Reward = Callable[..., dict[str, float]]
"""`score(view, **options) -> parts`; the reward of the trajectory is the sum of the parts."""
