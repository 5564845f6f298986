"""Stage score: the stateless reward of one finished trajectory.

Invariants
- A reward that can not be computed is a RewardFailure, never a number.
- It is one after `deadlines.score` at the latest, and the slot is free again. A thread can not be ended from
  outside, so the one of a reward that hangs goes on until its worker ends, which it does not delay.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from time import time
from typing import Any, TypeVar

from rewards.protocol import TrajectoryView
from rewards.registry import score as score_view
from rl.errors import RewardFailure
from rl.placement import runs_on
from rl.trajectory import Span, Trajectory
from tasks.runtime import runtime

T = TypeVar("T")


@runs_on("lambda")
async def score(run: str, trajectory: Trajectory) -> Trajectory:
    """The trajectory with its reward parts. Raises RewardFailure."""
    start = time()
    config = runtime(run).config
    section, seconds = config.domain(trajectory.problem.domain), config.deadlines.score
    view = TrajectoryView.of(trajectory)
    try:
        trajectory.rewards = await asyncio.wait_for(_in_daemon(lambda: score_view(section, view)), seconds)
    except TimeoutError as error:
        raise RewardFailure(
            f"reward {section.reward!r} of domain {section.name!r} gave nothing within deadlines.score "
            f"({seconds:g} s); its thread can not be ended and goes on"
        ) from error
    trajectory.spans.append(Span("score", start, time()))
    return trajectory


async def _in_daemon(work: Callable[[], T]) -> T:
    """What `work` returns or raises in a thread of its own. The threads of an executor would not do: the
    interpreter waits for them at its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not done.done():  # else nobody waits any more
            set_outcome(outcome)

    def body() -> None:
        outcome: tuple[Callable[[Any], None], Any]
        try:
            outcome = done.set_result, work()
        except Exception as error:
            outcome = done.set_exception, error
        except BaseException as error:  # in the event loop an exit would end the worker
            outcome = done.set_exception, RewardFailure(f"a reward raised {type(error).__name__}: {error}")
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=body, name="reward", daemon=True).start()
    return await done
