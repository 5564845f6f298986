"""One group's task graph: reset -> interact -> score per member, and admit once the last member is scored.

Invariants
- One failed or slow member costs itself: a spare takes its place (`rl.redundancy`), or it is started again, alone,
  within its budget; past it the group is given up by name, never scored.
- A group is complete with exactly `size` members, those that the redundancy policy chose; the others are cancelled, and
  `losers` names them, so that their generations can be aborted.
- Every node carries its hardware class; futures are dropped as soon as their consumer is done, so that the
  loss of a worker re-runs as little as possible.
- `run` ends within its deadline: with what `admit` returned, or with a named StageFailure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic
from typing import Any

from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client, Future, as_completed

from infra.compute.failures import named
from rl.errors import StageFailure, StaleTrajectory
from rl.placement import HardwareClass, placement_of
from rl.redundancy import RedundancyPolicy
from rl.trajectory import Problem, Uid

ALONE = RedundancyPolicy()
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
    together: Callable | None = None
    """Reset and interact of a whole batch in lockstep: together(run, starts) -> what `pick` takes from."""
    pick: Callable | None = None
    """pick(run, played, uid, member) -> trajectory. Raises what that member failed with."""


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
        redundancy: RedundancyPolicy = ALONE,
        played: Future | None = None,
    ):
        """`played`: what `Stages.together` gives; then the first try of every member is taken from it."""
        self._client, self._placements, self._run = client, placements, run
        self.uid, self.problem, self.version, self.size = uid, problem, version, size
        self._stem = f"{run}/{problem.domain}/{problem.split}/v{version}/{uid}"
        self._retries = retries
        self._deadline_s = deadline_s
        self._end = monotonic() + deadline_s
        self._redundancy, self._played = redundancy, played
        self._scored: dict[int, Future] = {}
        """In the order in which they were."""
        self._failed: set[int] = set()
        """Those whose place a spare took."""
        self._started: dict[int, tuple[int, Future]] = {}
        self._begun: list[Future] = []
        self._cancelled = self._complete = False
        self._lock = Lock()
        self.results: dict[int, Any] = {}
        """What the watched members were scored as."""
        self.tries = self.failures = 0
        self.lasted: list[float] = []
        """Seconds of the first tries that did not fail."""
        self.losers: list[tuple[int, int]] = []
        """(member, retry) of those that ran and were not needed; known when the group is complete."""

    @property
    def members(self) -> range:
        """All that are started, spares included."""
        return range(self.size + self._redundancy.extra_members)

    def run(self) -> Any:
        """All members, then admit: the unit `group`."""
        self._check()
        tries = [(member, 0) for member in self.members]
        watched = dict(zip(self._start(*tries), tries, strict=True))
        ready = as_completed(list(watched), loop=self._client.loop, timeout=self._deadline_s)
        chosen: list[int] | None = None
        try:
            for future in ready:
                member, retry = watched.pop(future)
                if future.status == "finished":
                    if (chosen := self._done(member, future)) is not None:
                        break
                elif (again := self._after_failure(future, member, retry)) is not None:
                    watched[again] = (member, retry + 1)
                    ready.add(again)
                elif (chosen := self._choose()) is not None:
                    break
        except TimeoutError as error:
            raise self._late() from error
        finally:
            if watched:
                self._client.cancel(list(watched))
        assert chosen is not None, "a member either is scored, or raises, or a spare is scored"
        return self._admit(chosen)

    def run_member(self, member: int) -> Any | None:
        """One member, from start to score; whoever makes the group complete admits it and returns the result: the
        unit `trajectory`."""
        self._check()
        if self._complete:  # a spare that nobody needs
            return None
        retry = 0
        again: Future | None = self._first_try(member)
        while (future := again) is not None:
            try:
                self.results[member] = future.result(timeout=max(0.0, self._end - monotonic()))
            except TimeoutError as error:
                self._client.cancel([future])
                raise self._late() from error
            except Exception:  # _after_failure raises what is not worth another try
                if self._complete:
                    return None  # it lost
                again = self._after_failure(future, member, retry)
                retry += 1
            else:
                chosen = self._done(member, future)
                return None if chosen is None else self._admit(chosen)
        chosen = self._choose()
        return None if chosen is None else self._admit(chosen)

    def _done(self, member: int, future: Future) -> list[int] | None:
        with self._lock:
            self._scored[member] = future
            if member in self._started and self._started[member][0] == 0:
                self.lasted.append(monotonic() - self._end + self._deadline_s)
        return self._choose()

    def _choose(self) -> list[int] | None:
        """The members of the group, once it is complete, and only once: from then on the others have lost."""
        with self._lock:
            chosen = self._redundancy.chosen(self.size, list(self._scored), self._failed)
            if chosen is None or self._complete:
                return None
            self._complete = True
            running = {m: s for m, s in self._started.items() if m not in {*chosen, *self._scored, *self._failed}}
            self.losers = [(member, retry) for member, (retry, _) in running.items()]
        self._client.cancel([future for _, future in running.values()])
        return chosen

    def _first_try(self, member: int) -> Future:
        """The member's first future; whoever comes first submits the whole group, in one graph."""
        with self._lock:
            if not self._begun:
                self._begun = self._start(*((m, 0) for m in self.members))
            return self._begun[member]

    def _check(self) -> None:
        """Whoever comes late to a group that was given up begins nothing. Raises StageFailure."""
        if self._cancelled:
            raise StageFailure(f"group {self.uid} was cancelled")

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
        self.tries += len(tries)
        if self._played is not None and all(retry == 0 for _, retry in tries):
            return self._take(self._played, [member for member, _ in tries])
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
        futures = self._futures(graph)
        self._started.update((member, (retry, future)) for (member, retry), future in zip(tries, futures, strict=True))
        return futures

    def _futures(self, graph: HighLevelGraph) -> list[Future]:
        """Submit; the futures of the scores, in the order of the tries."""
        return self._client.get(graph, list(graph.layers["score"]), sync=False)

    def _take(self, played: Future, members: list[int]) -> list[Future]:
        """The first tries of these members, which are in `played`."""
        stages = self._placements.stages
        assert stages.pick is not None
        futures = []
        for member in members:
            stem = f"{self._stem}/{member}/0"
            where = self._annotations("interact") | {"pure": False}
            one = self._client.submit(stages.pick, self._run, played, self.uid, member, key=("pick", stem), **where)
            where = self._annotations("score") | {"pure": False}
            futures.append(self._client.submit(stages.score, self._run, one, key=("score", stem), **where))
        self._started.update((member, (0, future)) for member, future in zip(members, futures, strict=True))
        return futures

    def _annotations(self, stage: str) -> dict[str, Any]:
        return {"resources": self._placements.resources(stage, self.problem.domain)}

    def _after_failure(self, future: Future, member: int, retry: int) -> Future | None:
        """Start a failed member again, or let a spare take its place (None), or raise why not."""
        cause = named(future.exception() if future.status == "error" else RuntimeError(f"its task was {future.status}"))
        with self._lock:
            if self._cancelled or isinstance(cause, StaleTrajectory):
                raise cause
            self.failures += 1
            if not self._redundancy.hopeless({*self._failed, member}):
                self._failed.add(member)
                return None
            if retry >= self._retries:
                raise cause
            return self._start((member, retry + 1))[0]

    def _admit(self, chosen: list[int]) -> Any:
        members = [self._scored[member] for member in chosen]
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
            raise named(error) from error
        finally:
            self._scored.clear()
            self._started.clear()
            self._begun.clear()
            self._played = None

    def _late(self) -> StageFailure:
        return StageFailure(
            f"group {self.uid} was not complete after {self._deadline_s:.0f} s ({len(self._scored)} of {self.size} "
            f"members scored); see deadlines.trajectory"
        )


def play_together(
    client: Client, placements: Placements, run: str, starts: Sequence[tuple[Uid, Problem]], size: int, version: int
) -> Future:
    """Start the groups of a batch in lockstep, in one task; give its future to their `GroupGraph`s. All domains of the
    batch go where the first one is placed, for they share one loop."""
    together = placements.stages.together
    assert together is not None
    return client.submit(
        together,
        run,
        [(uid, problem, version, size) for uid, problem in starts],
        key=("together", f"{run}/v{version}/{starts[0][0]}"),
        resources=placements.resources("interact", starts[0][1].domain),
        pure=False,
    )
