"""Stage score: the stateless reward of one finished trajectory.

By default a reward runs in this process, on a worker of the class `lambda`; with the section `serverless` those with
the `@serverless` mark run as functions, and the slot only waits for the answer. On one machine the former is faster:
`math` takes 0.5 ms here and 4.6 ms through the local endpoint (the least of 300 calls on two cores; a cold start takes
seconds). So functions are chosen where workers are dear, not where they are at hand (`benchmarks.serverless_reward`).

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
from rl.errors import RewardFailure
from rl.placement import runs_on
from rl.trajectory import Span, Trajectory
from tasks.runtime import runtime


@runs_on("lambda")
async def score(run: str, trajectory: Trajectory) -> Trajectory:
    """The trajectory with its reward parts. Raises RewardFailure."""
    start = time()
    here = runtime(run)
    section, seconds = here.config.domain(trajectory.problem.domain), here.config.deadlines.score
    view = TrajectoryView.of(trajectory)
    try:
        scoring = in_daemon(lambda: here.rewards.score(section, view, here.proxy), "reward")
        trajectory.rewards = await asyncio.wait_for(scoring, seconds)
    except TimeoutError as error:
        raise RewardFailure(
            f"reward {section.reward!r} of domain {section.name!r} gave nothing within deadlines.score "
            f"({seconds:g} s); its thread can not be ended and goes on"
        ) from error
    except ExitInThread as error:
        raise RewardFailure(f"reward {section.reward!r} of domain {section.name!r}: {error}") from error
    trajectory.spans.append(Span("score", start, time()))
    return trajectory
