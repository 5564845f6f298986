"""Stages together and pick: a whole batch of episodes in lockstep, which is how the mode `sync` plays.

    reset all -> | generate all -> | step all -> | generate all -> ... -> all are done        (| waits for the slowest)

Invariants
- The episodes are those of `tasks.interact`, in their own coroutines; only their turns wait for each other.
- One that failed or is over holds up nobody: a turn waits for those that still play.
- A member that failed, for whatever reason, is in the result as its failure, which `pick` raises: it is tried again
  alone, and the episodes of all others count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import time

from infra.compute.failures import named
from rl.errors import StageFailure
from rl.placement import runs_on
from rl.trajectory import Problem, Span, Trajectory, Uid
from tasks.interact import play
from tasks.reset import Member
from tasks.runtime import runtime

Played = dict[tuple[Uid, int], Trajectory | StageFailure]


class Lockstep:
    """A barrier for those that still play. On one event loop."""

    def __init__(self, playing: int):
        self._playing, self._waiting, self._all = playing, 0, asyncio.Event()

    async def turn(self) -> None:
        """Until everybody is here."""
        self._waiting += 1
        everybody = self._all
        self._look()
        await everybody.wait()

    def leave(self) -> None:
        """This one plays no longer."""
        self._playing -= 1
        self._look()

    def _look(self) -> None:
        if self._waiting and self._waiting == self._playing:
            self._all.set()
            self._waiting, self._all = 0, asyncio.Event()


@runs_on("cpu")
async def together(run: str, starts: Sequence[tuple[Uid, Problem, int, int]]) -> Played:
    """Play (uid, problem, version, size) each with `size` members."""
    members = [
        Member(uid, member, 0, problem, version) for uid, problem, version, size in starts for member in range(size)
    ]
    lockstep = Lockstep(len(members))
    found = await asyncio.gather(*(_one(run, member, lockstep) for member in members))
    return {(member.uid, member.member): one for member, one in zip(members, found, strict=True)}


async def _one(run: str, member: Member, lockstep: Lockstep) -> Trajectory | StageFailure:
    here, start = runtime(run), time()
    try:
        live = await here.environments.claim(member.key, member.problem)
        try:
            ready = Member(
                member.uid, member.member, 0, member.problem, member.version, (Span("reset", start, time()),)
            )
            return await play(here, ready, live, lockstep.turn)
        finally:
            await here.environments.release(live)
    except Exception as error:
        return named(error)
    finally:
        lockstep.leave()


@runs_on("cpu")
def pick(run: str, played: Played, uid: Uid, member: int) -> Trajectory:
    """One member's episode. Raises what it failed with."""
    one = played[uid, member]
    if isinstance(one, StageFailure):
        raise one
    return one
