"""The Prefect tasks: what one sees of a run in the UI.

Invariants: a task run costs a few CPU-milliseconds here and one row there, so a unit is a group or a trajectory,
never a stage; the outcome of every group leaves through its `outbox`, exactly once, also when the group fails;
results are not persisted, for the store is the truth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import Queue
from threading import Lock
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from infra.compute.graphs import GroupGraph
from rl.errors import StageFailure
from rl.trajectory import Uid


@dataclass(frozen=True)
class Ended:
    """How one group ended: with what its admit stage returned, or with a named failure."""

    uid: Uid
    sealed: Any | None
    failure: StageFailure | None = None


class Unit:
    """One group in flight, and where its outcome goes."""

    def __init__(self, graph: GroupGraph, outbox: Queue[Ended]):
        self.graph = graph
        self._outbox = outbox
        self._lock = Lock()
        self._ended = False

    def run(self, work: Callable[[], Any | None]) -> State:
        """Run `work` and report its outcome as a Prefect state."""
        try:
            sealed = work()
        except Exception as error:
            failure = error if isinstance(error, StageFailure) else StageFailure(f"{type(error).__name__}: {error}")
            self._end(Ended(self.graph.uid, None, failure))
            return Failed(message=f"{failure.reason}: {failure}")
        if sealed is not None:
            self._end(Ended(self.graph.uid, sealed))
        return Completed(message="scored" if sealed is None else "sealed")

    def _end(self, ended: Ended) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._outbox.put(ended)


@task(task_run_name="group {uid} {domain} v{version}", cache_policy=NO_CACHE, persist_result=False)
def group_unit(uid: str, domain: str, version: int, unit: Unit) -> State:
    """One group: all its members, then its seal."""
    return unit.run(unit.graph.run)


@task(task_run_name="trajectory {uid}/{member} {domain} v{version}", cache_policy=NO_CACHE, persist_result=False)
def trajectory_unit(uid: str, domain: str, version: int, member: int, unit: Unit) -> State:
    """One member of a group; the last one seals it."""
    return unit.run(lambda: unit.graph.run_member(member))
