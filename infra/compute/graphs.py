"""One group's task graph: reset -> interact -> score per member, and admit once the last member is scored.

Invariants
- One failed or slow member costs itself: it is started again, alone, within its budget; past it the group is
  given up by name, never scored.
- Every node carries its hardware class; futures are dropped as soon as their consumer is done, so that the
  loss of a worker re-runs as little as possible.
- `run` ends within its deadline: with what `admit` returned, or with a named StageFailure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic
from typing import Any

from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client, Future, as_completed
from distributed.scheduler import KilledWorker

from rl.errors import StageFailure, StaleTrajectory
from rl.placement import HardwareClass, placement_of
from rl.trajectory import Problem, Uid

ADMIT_PRIORITY = 10
"""Closing a group goes before starting new members on the same workers."""


@dataclass(frozen=True)
class Stages:
    """The four stage functions, each marked by `@runs_on`.

    reset(run, uid, member, retry, problem, version) -> handle; interact(run, handle) -> trajectory;
    score(run, trajectory) -> trajectory; admit(run, *trajectories) -> anything small.
    """

    reset: Callable
    interact: Callable
    score: Callable
    admit: Callable


@dataclass(frozen=True)
class Placements:
    """Hardware class by stage and domain, resolved once per run: the hot path only looks up."""

    stages: Stages
    pools: dict[HardwareClass, float]
    _memo: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)

    def resources(self, stage: str, domain: str) -> dict[str, int]:
        key = (stage, domain)
        if key not in self._memo:
            where = placement_of(getattr(self.stages, stage)).resolve(domain, self.pools)
            self._memo[key] = {where.value: 1}
        return self._memo[key]


class GroupGraph:
    """The graph of one attempt at one problem. Thread-safe: members may be watched from different threads."""

    def __init__(
        self,
        client: Client,
        placements: Placements,
        run: str,
        uid: Uid,
        problem: Problem,
        version: int,
        size: int,
        retries: int,
        deadline_s: float,
    ):
        self._client, self._placements, self._run = client, placements, run
        self.uid, self.problem, self.version, self.size = uid, problem, version, size
        self._stem = f"{run}/{problem.domain}/{problem.split}/v{version}/{uid}"
        self._retries = retries
        self._deadline_s = deadline_s
        self._end = monotonic() + deadline_s
        self._scored: dict[int, Future] = {}
        self._started: dict[int, tuple[int, Future]] = {}
        self._begun: list[Future] = []
        self._cancelled = False
        self._lock = Lock()

    def run(self) -> Any:
        """All members, then admit: the unit `group`."""
        tries = [(member, 0) for member in range(self.size)]
        watched = dict(zip(self._start(*tries), tries, strict=True))
        ready = as_completed(list(watched), loop=self._client.loop, timeout=self._deadline_s)
        try:
            for future in ready:
                member, retry = watched.pop(future)
                if future.status == "finished":
                    self._scored[member] = future
                    continue
                again = self._after_failure(future, member, retry)
                watched[again] = (member, retry + 1)
                ready.add(again)
        except TimeoutError as error:
            raise self._late() from error
        finally:
            if watched:
                self._client.cancel(list(watched))
        return self._admit()

    def run_member(self, member: int) -> Any | None:
        """One member, from start to score; the last one of the group admits it and returns the result: the
        unit `trajectory`."""
        retry = 0
        future = self._first_try(member)
        while True:
            try:
                future.result(timeout=max(0.0, self._end - monotonic()))
                break
            except TimeoutError as error:
                self._client.cancel([future])
                raise self._late() from error
            except Exception:  # _after_failure raises what is not worth another try
                future = self._after_failure(future, member, retry)
                retry += 1
        with self._lock:
            self._scored[member] = future
            last = len(self._scored) == self.size
        return self._admit() if last else None

    def _first_try(self, member: int) -> Future:
        """The member's first future; whoever comes first submits the whole group, in one graph."""
        with self._lock:
            if not self._begun:
                self._begun = self._start(*((m, 0) for m in range(self.size)))
            return self._begun[member]

    def cancel(self) -> list[tuple[int, int]]:
        """Start nothing more, and drop what waits; the (member, retry) pairs started so far, so that their
        generations can be aborted: what runs on a worker ends at its next turn, not before."""
        self._cancelled = True
        started = dict(self._started)
        self._client.cancel([future for _, future in started.values()])
        return [(member, retry) for member, (retry, _) in started.items()]

    def _start(self, *tries: tuple[int, int]) -> list[Future]:
        """Submit the chains of these (member, retry) as one graph, which costs half of a submission per node; the
        futures of the inner nodes never exist, so the workers drop what they hold as soon as it was used."""
        stages, run = self._placements.stages, self._run
        layers: dict[str, dict[tuple[str, str], tuple]] = {"reset": {}, "interact": {}, "score": {}}
        for member, retry in tries:
            stem = f"{self._stem}/{member}/{retry}"
            reset, interact, score = ((stage, stem) for stage in layers)
            layers["reset"][reset] = (stages.reset, run, self.uid, member, retry, self.problem, self.version)
            layers["interact"][interact] = (stages.interact, run, reset)
            layers["score"][score] = (stages.score, run, interact)
        graph = HighLevelGraph(
            {name: MaterializedLayer(nodes, self._annotations(name)) for name, nodes in layers.items()},
            {"reset": set(), "interact": {"reset"}, "score": {"interact"}},
        )
        futures = self._client.get(graph, list(layers["score"]), sync=False)
        self._started.update((member, (retry, future)) for (member, retry), future in zip(tries, futures, strict=True))
        return futures

    def _annotations(self, stage: str) -> dict[str, Any]:
        return {"resources": self._placements.resources(stage, self.problem.domain)}

    def _after_failure(self, future: Future, member: int, retry: int) -> Future:
        """Start a failed member again, or raise why not."""
        cause = _named(
            future.exception() if future.status == "error" else RuntimeError(f"its task was {future.status}")
        )
        if self._cancelled or isinstance(cause, StaleTrajectory) or retry >= self._retries:
            raise cause
        return self._start((member, retry + 1))[0]

    def _admit(self) -> Any:
        members = [self._scored[i] for i in range(self.size)]
        future = self._client.submit(
            self._placements.stages.admit,
            self._run,
            *members,
            key=("admit", self._stem),
            resources=self._placements.resources("admit", self.problem.domain),
            priority=ADMIT_PRIORITY,
            pure=False,
        )
        try:
            return future.result(timeout=max(0.0, self._end - monotonic()))
        except TimeoutError as error:
            raise self._late() from error
        except Exception as error:
            raise _named(error) from error
        finally:
            self._scored.clear()
            self._started.clear()
            self._begun.clear()

    def _late(self) -> StageFailure:
        return StageFailure(
            f"group {self.uid} was not complete after {self._deadline_s:.0f} s ({len(self._scored)} of {self.size} "
            f"members scored); see deadlines.trajectory"
        )


def _named(cause: BaseException) -> StageFailure:
    """Whatever went wrong, as a failure with a name."""
    if isinstance(cause, StageFailure):
        return cause
    if isinstance(cause, KilledWorker):
        return StageFailure(f"its workers died: {cause}")
    return StageFailure(f"{type(cause).__name__}: {cause}")
