"""The rollout of one run: which groups start, what becomes of them.

Invariants
- What is admitted is a pure function of the log, the sealed segments and the version that the engines serve
  (`rl.selection.admissible`): nothing here owns a cursor, and it may be gone and made again at any moment.
- It shares nothing with the training side but the store and the proxy.
- What is started is told in the store before it starts (`infra.store.flights`), where steps wait for it.
- What lost against a spare is ended: its generation is aborted, so that its environment closes.
- A group that fails ends as a tombstone with its reason; a run of failures past its budget ends the rollout by name.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from queue import Empty, Queue
from statistics import fmean

from distributed import Client

from flows.home import Home
from flows.tracing import Tracing
from flows.units import Ended, Unit, submit
from infra.compute.graphs import GroupGraph, Placements, Stages, play_together
from infra.compute.staged import StagedGraph
from infra.proxy.client import ControlClient
from infra.store.buffer import SampleBuffer
from infra.store.flights import Flights
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.config.run import RunConfig
from rl.errors import RollmillError, StaleTrajectory, TooManyFailures
from rl.placement import HardwareClass
from rl.redundancy import RedundancyPolicy
from rl.selection import Candidate, admissible
from rl.tail import Tail
from rl.trajectory import Group, Uid
from tasks.admit import Sealed, admit
from tasks.interact import interact
from tasks.reset import member_key, reset
from tasks.runtime import install, uninstall
from tasks.score import score
from tasks.together import pick, together

ABORT_S = 2.0
TRACES_S = 5.0
"""For the last traces to reach MLflow."""
SIZES = 64
"""Groups over which the size is averaged."""
STAGES = Stages(reset, interact, score, admit, together, pick)


class Feeder:
    """Admits, watches, and gives up by name. `key` is the run's own of the role `rollout`; `lease` as for
    `tasks.runtime.install`; `label` stands before the domain in the UI."""

    def __init__(
        self,
        config: RunConfig,
        client: Client,
        proxy_url: str,
        pools: dict[HardwareClass, float],
        key: str | None,
        lease: str | None = None,
        label: str = "",
    ):
        store = ObjectStore.connect(config.store)
        self.config, self._client, self._label = config, client, label
        self.room: int | None = None
        """Trajectories of it that may be in flight at once, so that a group with its spares is no larger; None: any."""
        self._log = CommitLog(store, config.prefix, writer=f"rollout-{uuid.uuid4().hex[:8]}")
        self._buffer = SampleBuffer(store, config.prefix)
        self._aborter = ControlClient(proxy_url, deadline_s=ABORT_S, key=key)
        self._run = install(client, config, proxy_url, Home.default().cache, key, lease)
        self._placements = Placements(STAGES, pools)
        self._outbox: Queue[Ended] = Queue()
        self._in_flight: dict[Uid, Unit] = {}
        self._flights = Flights(store, config.prefix)
        self._sealed: dict[Uid, Candidate] = {}
        self._tail = Tail()
        self._sizes: deque[float] = deque(maxlen=SIZES)
        """Bytes of the newest groups: what the next ones will take."""
        self._tracing = Tracing(config, store)
        self._told = False
        self.sealed = self.generated_tokens = 0
        """Groups, and tokens of them, that were sealed from here."""
        self._failures_in_a_row = 0

    def begin(self) -> None:
        """Learn what there is. Raises a StoreError or LogCorrupt."""
        ledger = self._log.sync()
        if self.config.waits:
            self._flights.tell({})  # what an earlier process had in flight died with it
        self._sealed = {c.uid: c for c in self._buffer.refresh(ledger, self.config.policy)}
        if self._sealed:
            self._sizes.append(self._buffer.pending_bytes / len(self._sealed))

    def trained(self) -> bool:
        """Whether the log, read anew, has the last version."""
        return (self._log.sync().head or 0) >= self.config.training.steps

    @property
    def head(self) -> int | None:
        """The newest version, as of the last look."""
        return self._log.ledger.head

    @property
    def members(self) -> int:
        """Trajectories that start together, as a group."""
        return self.config.training.group_size + self._redundancy.extra_members

    @property
    def in_flight(self) -> int:
        """Trajectories."""
        return sum(len(unit.graph.members) for unit in self._in_flight.values())

    def admissible(self, serving: int) -> list[Uid]:
        """The attempts that may start now, while this version is served, by the log as it was last read."""
        self._forget_settled()
        ledger = self._log.ledger
        policy, drops = self.config.policy, self.config.drops
        most = None
        if self._sizes:
            most = int(self.config.rollout.max_pending_mb * 1e6 / fmean(self._sizes))
            if most < policy.buffer_groups and not self._told:
                self._told = True
                print(
                    f"rollout.max_pending_mb ({self.config.rollout.max_pending_mb:g}) holds {most} groups of the "
                    f"{policy.buffer_groups} that alpha {policy.alpha} allows: rollout is held back",
                    flush=True,
                )
        return admissible(ledger, serving, self._sealed.values(), self._in_flight, policy, drops, most)

    @property
    def _redundancy(self) -> RedundancyPolicy:
        training = self.config.training
        seen = self._tail.spares(training.group_size, training.groups_per_step)
        return self.config.rollout.redundancy.policy(seen, self.room and self.room - training.group_size)

    def start(self, uids: Sequence[Uid], serving: int) -> None:
        """Start these attempts."""
        if not uids:
            return
        config = self.config
        if config.waits:
            flying = {uid: unit.graph.version for uid, unit in self._in_flight.items()}
            self._flights.tell(flying | dict.fromkeys(uids, serving))
        starts = [(uid, config.stream.problem(uid.ordinal)) for uid in uids]
        size, played = config.training.group_size, None
        redundancy = self._redundancy
        if config.mode.lockstep:
            size_together = size + redundancy.extra_members
            played = play_together(self._client, self._placements, self._run, starts, size_together, serving)
        for uid, problem in starts:
            graph = (StagedGraph if config.rollout.unit == "stage" else GroupGraph)(
                self._client,
                self._placements,
                self._run,
                uid,
                problem,
                serving,
                size,
                config.rollout.member_retries,
                config.deadlines.trajectory,
                redundancy,
                played,
            )
            unit = self._in_flight[uid] = Unit(graph, self._outbox)
            submit(config.rollout.unit, str(uid), self._label + problem.domain, serving, unit)

    def collect(self, wait_s: float) -> int:
        """Take what ended, and how many groups that were; wait so long when nothing did. Raises TooManyFailures, a
        StoreError."""
        count = 0
        with suppress(Empty):
            ended = self._outbox.get(timeout=wait_s) if wait_s > 0 else self._outbox.get_nowait()
            while True:
                self._end(ended)
                count += 1
                ended = self._outbox.get_nowait()
        return count

    def cancel(self) -> None:
        """End whatever is in flight, without a trace: it is drawn again."""
        for unit in self._in_flight.values():
            self._cancel(unit.graph)
        self._in_flight.clear()
        self._tracing.close(TRACES_S)

    def leave(self) -> None:
        """The same, and take the run off the workers: its environments close."""
        self.cancel()
        uninstall(self._client, self._run)

    def _end(self, ended: Ended) -> None:
        unit = self._in_flight.pop(ended.uid, None)
        if unit is None:  # it was cancelled meanwhile
            return
        self._tail.note(unit.graph.tries, unit.graph.failures, unit.graph.lasted)
        self._abort(unit.graph, unit.graph.losers)
        if ended.sealed is not None:
            sealed: Sealed = ended.sealed
            self._sealed[ended.uid] = sealed.candidate
            self._sizes.append(sealed.size)
            self._tracing.note(unit.graph.problem, sealed)
            self.sealed += 1
            self.generated_tokens += sealed.generated_tokens
            self._failures_in_a_row = 0
            return
        assert ended.failure is not None
        print(f"group {ended.uid} given up: {ended.failure.reason}: {ended.failure}", flush=True)
        self._cancel(unit.graph)
        self._give_up(unit.graph, ended.failure.reason)
        if not isinstance(ended.failure, StaleTrajectory):
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= self.config.rollout.max_consecutive_failures:
                raise TooManyFailures(
                    f"{self._failures_in_a_row} groups in a row were given up, the last one for "
                    f"{ended.failure.reason}: {ended.failure} (rollout.max_consecutive_failures)"
                )

    def _give_up(self, graph: GroupGraph, reason: str) -> None:
        """Seal a tombstone: the trainer drops the attempt by this reason and grants the next one."""
        group = Group.give_up(graph.uid, graph.problem, self._log.sync().head or 0, reason)
        self._buffer.seal([group], writer=f"t{graph.uid.ordinal:010d}", seq=graph.uid.attempt)
        self._sealed[graph.uid] = Candidate.of(group)

    def _cancel(self, graph: GroupGraph) -> None:
        """End what is left of a group: its generations are aborted now, its environments close at their turn."""
        self._abort(graph, graph.cancel())

    def _abort(self, graph: GroupGraph, tries: Iterable[tuple[int, int]]) -> None:
        with suppress(RollmillError):  # a proxy that does not answer generates nothing either
            for member, retry in tries:
                self._aborter.abort(member_key(graph.problem, graph.uid, member, retry))

    def _forget_settled(self) -> None:
        ledger = self._log.ledger
        floor = self.config.policy.floor(ledger)
        self._sealed = {u: c for u, c in self._sealed.items() if ledger.is_open(u) and c.version >= floor}
