"""Stage score: the stateless reward of one finished trajectory.

Invariants
- A reward that can not be computed is a RewardFailure, never a number.
- It is one after `deadlines.score` at the latest, and the slot is free again. A thread can not be ended from
  outside, so the one of a reward that hangs goes on until its worker ends, which it does not delay.
"""

from __future__ import annotations

import asyncio
from time import time

from envs.threads import ExitInThread, in_daemon
from rewards.protocol import TrajectoryView
from rewards.registry import score as score_view
from rl.errors import RewardFailure
from rl.placement import runs_on
from rl.trajectory import Span, Trajectory
from tasks.runtime import runtime


@runs_on("lambda")
async def score(run: str, trajectory: Trajectory) -> Trajectory:
    """The trajectory with its reward parts. Raises RewardFailure."""
    start = time()
    config = runtime(run).config
    section, seconds = config.domain(trajectory.problem.domain), config.deadlines.score
    view = TrajectoryView.of(trajectory)
    try:
        trajectory.rewards = await asyncio.wait_for(in_daemon(lambda: score_view(section, view), "reward"), seconds)
    except TimeoutError as error:
        raise RewardFailure(
            f"reward {section.reward!r} of domain {section.name!r} gave nothing within deadlines.score "
            f"({seconds:g} s); its thread can not be ended and goes on"
        ) from error
    except ExitInThread as error:
        raise RewardFailure(f"reward {section.reward!r} of domain {section.name!r}: {error}") from error
    trajectory.spans.append(Span("score", start, time()))
    return trajectory
