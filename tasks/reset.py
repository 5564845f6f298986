"""Stage reset: start one member's environment, ahead of its turns.

Invariant: idempotent by (uid, member, retry): starting again replaces what was parked.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import time

from rl.placement import runs_on
from rl.trajectory import Problem, Span, Uid
from tasks.runtime import runtime


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a group on its way: who it is and under which version it starts."""

    uid: Uid
    member: int
    retry: int
    problem: Problem
    version: int
    spans: tuple[Span, ...] = ()

    @property
    def key(self) -> str:
        return member_key(self.problem, self.uid, self.member, self.retry)


def member_key(problem: Problem, uid: Uid, member: int, retry: int) -> str:
    """Names one try of one trajectory everywhere: environment manager, proxy, logs."""
    return f"{problem.domain}-{problem.split}-{uid}-{member}-{retry}"


@runs_on("cpu")
async def reset(run: str, uid: Uid, member: int, retry: int, problem: Problem, version: int) -> Member:
    """Start the environment and park it; where places are short, interact starts it. Raises EnvironmentFailure,
    EnvironmentTimeout."""
    start = time()
    this = Member(uid, member, retry, problem, version)
    await runtime(run).environments.park(this.key, problem)
    return Member(uid, member, retry, problem, version, (Span("reset", start, time()),))
