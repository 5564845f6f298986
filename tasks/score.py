"""Stage score: the stateless reward of one finished trajectory.

Invariant: a reward that can not be computed is a RewardFailure, never a number.
"""

from __future__ import annotations

from time import time

from rewards.protocol import TrajectoryView
from rewards.registry import score as score_view
from rl.placement import runs_on
from rl.trajectory import Span, Trajectory
from tasks.runtime import runtime


@runs_on("lambda")
def score(run: str, trajectory: Trajectory) -> Trajectory:
    """The trajectory with its reward parts. Raises RewardFailure."""
    start = time()
    section = runtime(run).config.domain(trajectory.problem.domain)
    trajectory.rewards = score_view(section, TrajectoryView.of(trajectory))
    trajectory.spans.append(Span("score", start, time()))
    return trajectory
