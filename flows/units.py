"""The Prefect tasks: what one sees of a run in the UI.

Invariants: a task run costs a few CPU-milliseconds here and one row there, so a unit is a group or a trajectory, and a
stage only in runs so small that one wants to watch them; its state says how long each stage took; the outcome of every
group leaves through its `outbox`, exactly once, also when the group fails; results are not persisted, for the store is
the truth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import Queue
from threading import Lock
from typing import Any

from prefect import allow_failure, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed

from flows.stories import of_failure, of_group, of_trajectory
from infra.compute.graphs import GroupGraph
from infra.compute.staged import StagedGraph
from rl.errors import StageFailure
from rl.trajectory import Trajectory, Uid
from tasks.admit import Sealed


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

    def run(self, work: Callable[[], Any | None], member: int | None = None) -> State:
        """Run `work`, of one `member` or the whole group, and report its outcome as a Prefect state."""
        try:
            sealed = work()
        except Exception as error:
            failure = self._named(error)
            self._end(Ended(self.graph.uid, None, failure))
            return Failed(message=of_failure(failure))
        if sealed is not None:
            self._end(Ended(self.graph.uid, sealed))
        return Completed(message=self._story(sealed, member))

    def stage(self, member: int, stage: str) -> State:
        """Watch one stage of one member."""
        assert isinstance(self.graph, StagedGraph)
        try:
            result = self.graph.watch(member, stage)
        except Exception as error:
            failure = self._named(error)
            self._end(Ended(self.graph.uid, None, failure))
            return Failed(message=of_failure(failure))
        if result is None:
            return Cancelled(message="the group does without it")
        return Completed(message=of_trajectory(result) if stage == "score" else f"{stage} is done")

    def _story(self, sealed: Any | None, member: int | None) -> str:
        told = []
        if member is not None and isinstance(scored := self.graph.results.pop(member, None), Trajectory):
            told.append(of_trajectory(scored))
        if sealed is not None:
            told.append(of_group(sealed) if isinstance(sealed, Sealed) else "sealed")
        return " · ".join(told) or "the group does without it"

    @staticmethod
    def _named(error: Exception) -> StageFailure:
        return error if isinstance(error, StageFailure) else StageFailure(f"{type(error).__name__}: {error}")

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
    return unit.run(lambda: unit.graph.run_member(member), member)


def _stage(name: str) -> Any:
    @task(name=name, task_run_name=f"{name} {{uid}}/{{member}} {{domain}} v{{version}}", cache_policy=NO_CACHE,
          persist_result=False)  # fmt: skip
    def watched(uid: str, domain: str, version: int, member: int, unit: Unit) -> State:
        return unit.stage(member, name)

    return watched


reset_unit, interact_unit, score_unit = _stage("reset"), _stage("interact"), _stage("score")
"""The stages of one member, each a task run: for small runs."""


@task(task_run_name="admit {uid} {domain} v{version}", cache_policy=NO_CACHE, persist_result=False)
def admit_unit(uid: str, domain: str, version: int, unit: Unit) -> State:
    """The seal of a group whose members' stages were watched one by one."""
    assert isinstance(unit.graph, StagedGraph)
    return unit.run(unit.graph.close)


def submit(units: str, uid: str, domain: str, version: int, unit: Unit) -> None:
    """Start the task runs of one group: one, one per trajectory, or one per stage (`rollout.unit`)."""
    if units == "group":
        group_unit.submit(uid, domain, version, unit)
    elif units == "trajectory":
        for member in unit.graph.members:
            trajectory_unit.submit(uid, domain, version, member, unit)
    else:
        scores: list[Any] = []
        for member in unit.graph.members:
            before: list[Any] = []
            stages: tuple[Any, ...] = (reset_unit, interact_unit, score_unit)
            for stage in stages:
                after = [allow_failure(f) for f in before]
                before = [stage.submit(uid, domain, version, member, unit, wait_for=after)]
            scores += before
        last: Any = admit_unit
        last.submit(uid, domain, version, unit, wait_for=[allow_failure(f) for f in scores])


def threads(units: str, members: int) -> int:
    """Task runs of one group that may wait at once."""
    return {"group": 1, "trajectory": members, "stage": 3 * members + 1}[units]
