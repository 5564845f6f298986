"""The rollout flow: keeps as many groups in flight as the staleness bound allows, until the run is trained.

Invariants
- What is admitted is a pure function of the log, the sealed segments and the version that the engines serve
  (`rl.selection.admissible`): this process owns no cursor, and may be killed and started again at any moment.
- It shares nothing with the training side but the store and the proxy.
- What is started is told in the store before it starts (`infra.store.flights`), where steps wait for it.
- What lost against a spare is ended: its generation is aborted, so that its environment closes.
- A group that fails ends as a tombstone with its reason; a run of failures past its budget ends the flow by name.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from statistics import fmean
from time import monotonic, sleep
from typing import Any

import typer
from distributed import Client
from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from flows.flow_runs import ends_with_its_run, sign
from flows.home import Home
from flows.quiet import quiet_failures
from flows.units import Ended, Unit, group_unit, trajectory_unit
from infra.compute.graphs import GroupGraph, Placements, Stages, play_together
from infra.compute.lifeline import NAMED, die_with_parent, last_words
from infra.compute.pools import connect, wait_for_slots
from infra.proxy.client import ControlClient, ProxyUnavailable
from infra.proxy.secret import rollout_key
from infra.store.buffer import SampleBuffer
from infra.store.flights import Flights
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.config.load import loads
from rl.config.run import RunConfig
from rl.errors import RollmillError, StaleTrajectory, TooManyFailures
from rl.ledger import Ledger
from rl.placement import HardwareClass
from rl.selection import Candidate, admissible
from rl.tail import Tail
from rl.trajectory import Group, Uid
from tasks.admit import Sealed, admit
from tasks.interact import interact
from tasks.reset import member_key, reset
from tasks.runtime import install
from tasks.score import score
from tasks.together import pick, together

POLL_S = 0.1
"""Between two looks at the served version, while nothing ends."""
ABORT_S = 2.0
SIZES = 64
"""Groups over which the size is averaged."""
STAGES = Stages(reset, interact, score, admit, together, pick)


@flow(name="rollout", flow_run_name="rollout {run}", validate_parameters=False, persist_result=False)
@ends_with_its_run
def rollout(run: str, config_file: str, scheduler: str, proxy_url: str) -> int:
    """Roll out groups until the log has the last version; the number of groups sealed by this process."""
    config = loads(Path(config_file).read_text())
    sign(config)
    with connect(scheduler, config.deadlines.start) as client:
        return Feeder(config, client, proxy_url).run()


class Feeder:
    """Admits, watches, and gives up by name."""

    def __init__(self, config: RunConfig, client: Client, proxy_url: str):
        store = ObjectStore.connect(config.store)
        self._config, self._client = config, client
        self._log = CommitLog(store, config.prefix, writer=f"rollout-{uuid.uuid4().hex[:8]}")
        self._buffer = SampleBuffer(store, config.prefix)
        self._proxy = ControlClient(proxy_url, deadline_s=config.deadlines.control, key=rollout_key())
        self._aborter = ControlClient(proxy_url, deadline_s=ABORT_S, key=rollout_key())
        self._run = install(client, config, proxy_url, Home.default().cache, rollout_key())
        self._placements = Placements(STAGES, wait_for_slots(client, {HardwareClass.CPU}, config.deadlines.start))
        self._outbox: Queue[Ended] = Queue()
        self._in_flight: dict[Uid, Unit] = {}
        self._flights = Flights(store, config.prefix)
        self._sealed: dict[Uid, Candidate] = {}
        self._tail = Tail()
        self._sizes: deque[float] = deque(maxlen=SIZES)
        """Bytes of the newest groups: what the next ones will take."""
        self._told = False
        self._count = 0
        self._failures_in_a_row = 0

    def run(self) -> int:
        ledger = self._log.sync()
        if self._config.waits:
            self._flights.tell({})  # what an earlier process had in flight died with it
        self._sealed = {c.uid: c for c in self._buffer.refresh(ledger, self._config.policy)}
        if self._sealed:
            self._sizes.append(self._buffer.pending_bytes / len(self._sealed))
        try:
            while (ledger.head or 0) < self._config.training.steps:
                serving = self._served()
                ledger = self._log.sync()
                self._forget_settled()
                if serving is not None:
                    self._start(self._admissible(ledger, serving), serving)
                self._collect()
            return self._count
        finally:
            for unit in self._in_flight.values():
                self._cancel(unit.graph)

    def _admissible(self, ledger: Ledger, serving: int) -> list[Uid]:
        policy, drops = self._config.policy, self._config.drops
        most = None
        if self._sizes:
            most = int(self._config.rollout.max_pending_mb * 1e6 / fmean(self._sizes))
            if most < policy.buffer_groups and not self._told:
                self._told = True
                print(
                    f"rollout.max_pending_mb ({self._config.rollout.max_pending_mb:g}) holds {most} groups of the "
                    f"{policy.buffer_groups} that alpha {policy.alpha} allows: rollout is held back",
                    flush=True,
                )
        return admissible(ledger, serving, self._sealed.values(), self._in_flight, policy, drops, most)

    def _served(self) -> int | None:
        """The version that the engines serve. An engine that is away is being started again: wait for it, but
        not for ever."""
        end = monotonic() + self._config.deadlines.start
        while True:
            try:
                return self._proxy.status().serving
            except ProxyUnavailable:
                if monotonic() > end:
                    raise
                sleep(POLL_S)

    def _start(self, uids: list[Uid], serving: int) -> None:
        if not uids:
            return
        config = self._config
        if config.waits:
            flying = {uid: unit.graph.version for uid, unit in self._in_flight.items()}
            self._flights.tell(flying | dict.fromkeys(uids, serving))
        starts = [(uid, config.stream.problem(uid.ordinal)) for uid in uids]
        size, played = config.training.group_size, None
        redundancy = config.rollout.redundancy.policy(self._tail.spares(size))
        if config.mode.lockstep:
            size_together = size + redundancy.extra_members
            played = play_together(self._client, self._placements, self._run, starts, size_together, serving)
        for uid, problem in starts:
            graph = GroupGraph(
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
            if config.rollout.unit == "group":
                group_unit.submit(str(uid), problem.domain, serving, unit)
            else:
                for member in graph.members:
                    trajectory_unit.submit(str(uid), problem.domain, serving, member, unit)

    def _collect(self) -> None:
        """Take what ended; wait a moment when nothing did."""
        with suppress(Empty):
            ended = self._outbox.get(timeout=POLL_S)
            while True:
                self._end(ended)
                ended = self._outbox.get_nowait()

    def _end(self, ended: Ended) -> None:
        unit = self._in_flight.pop(ended.uid)
        self._tail.note(unit.graph.tries, unit.graph.failures)
        self._abort(unit.graph, unit.graph.losers)
        if ended.sealed is not None:
            sealed: Sealed = ended.sealed
            self._sealed[ended.uid] = sealed.candidate
            self._sizes.append(sealed.size)
            self._count += 1
            self._failures_in_a_row = 0
            return
        assert ended.failure is not None
        print(f"group {ended.uid} given up: {ended.failure.reason}: {ended.failure}", flush=True)
        self._cancel(unit.graph)
        self._give_up(unit.graph, ended.failure.reason)
        if not isinstance(ended.failure, StaleTrajectory):
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= self._config.rollout.max_consecutive_failures:
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
        floor = self._config.policy.floor(ledger)
        self._sealed = {u: c for u, c in self._sealed.items() if ledger.is_open(u) and c.version >= floor}


def main(config_file: Path, scheduler: str, proxy_url: str) -> None:
    """Run the rollout side of a run as a process of its own."""
    die_with_parent()
    quiet_failures()
    config = loads(config_file.read_text())
    most = config.training.group_size + max(config.training.group_size, config.rollout.redundancy.extra_members or 0)
    threads = config.policy.buffer_groups * (1 if config.rollout.unit == "group" else most)
    runner: Any = ThreadPoolTaskRunner(max_workers=threads + 8)
    try:
        rollout.with_options(task_runner=runner)(
            f"{config.tenant}/{config.name}", str(config_file), scheduler, proxy_url
        )
    except RollmillError as error:
        last_words("rollout", error)
        raise SystemExit(NAMED) from None


if __name__ == "__main__":
    typer.run(main)
