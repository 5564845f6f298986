"""The rollout of all jobs of a service: one process, one feeder for each job that runs, one limit for all together.

    job book -> feeders -> what each may start (its staleness bound) -> rl.fairness.allot -> started

Invariants
- What a job does, or fails at, ends that job alone, by a reason in the job book; a store or a proxy that is gone for
  good ends the process, by name.
- Killed at any moment and started again, it goes on from the book, the logs and the sealed segments.
- A job that is paused or over has nothing in flight: what it had ends without a trace, and is drawn again.
- No more trajectories are in flight than `rl.concurrency` finds room for, or the service allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import typer
from distributed import Client
from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from flows.feeder import Feeder
from flows.flow_runs import ends_with_its_run, sign
from flows.playing import Alone, BudgetSpent, Playing, Usage
from flows.quiet import quiet_failures
from flows.rollout import served
from flows.told import leaving, run_flow
from infra.compute.lifeline import NAMED, die_with_parent, last_words
from infra.compute.pools import connect, slots, wait_for_slots
from infra.proxy.auth import tenant_key
from infra.proxy.client import ControlClient
from infra.proxy.secret import rollout_key
from infra.proxy.wire import ServiceStatus
from infra.store.arrivals import Arrivals
from infra.store.jobs import JobBook
from infra.store.objects import ObjectStore
from rl.concurrency import Concurrency, Load
from rl.config.load import dumps, loads_as
from rl.config.tenants import ServiceConfig
from rl.errors import DeadlineExceeded, RollmillError
from rl.fairness import Demand, PassedOver, allot
from rl.jobs import Entry, JobRefused, shares
from rl.placement import HardwareClass
from rl.rounds import Rounds
from tasks.runtime import run_key

POLL_S = 0.05
STATUS_S = 0.1
"""Between two questions to the proxy, which costs the engine within it."""
BOOK_S = 0.5
LOOK_S, CROWD = 1.0, 8
"""Between two looks into a job's log while nothing is known to have changed; of more jobs than that each is looked at
less often, so that all together ask the store no more."""
LOAD_S = 1.0
"""Between two looks at the engines' load."""
LARGE = 1024
"""Trajectories at once on a cluster of somebody else, whose size is not known before it is reached."""


@flow(name="tenant rollout", flow_run_name="rollout {name}", validate_parameters=False, persist_result=False)
@ends_with_its_run
def rollout(name: str, service_file: str, scheduler: str, proxy_url: str, lease: str) -> None:
    """Roll out the jobs of a service until told to stop."""
    service = loads_as(ServiceConfig, Path(service_file).read_text())
    sign(service.host)
    with connect(scheduler, service.deadlines.start) as client:
        Rollout(service, client, proxy_url, lease).run()


class Rollout:
    """Of one service."""

    def __init__(self, service: ServiceConfig, client: Client, proxy_url: str, lease: str):
        key = rollout_key()
        assert key is not None, "the service gives its rollout a key"
        self._service, self._client, self._url, self._lease, self._key = service, client, proxy_url, lease, key
        self._host = service.host
        self._pools = wait_for_slots(client, {HardwareClass.CPU}, service.deadlines.start)
        self._store = ObjectStore.connect(service.store)
        self._book = JobBook(self._store, service.name)
        self._arrivals = Arrivals(self._store, service.name)
        self._proxy = ControlClient(proxy_url, deadline_s=service.deadlines.control, key=key)
        self._playing: dict[str, Playing] = {}
        self._most = LARGE
        self._most = self._room()
        self._concurrency = Concurrency(slots_of(service), min(2, self._most), self._most)
        self._in_line: frozenset[str] = frozenset()
        self._booked = self._loaded = self._asked = 0.0
        self._passed_over = PassedOver(service.queue.patience)
        self._rounds = Rounds() if service.schedule == "rounds" else None

    def run(self) -> None:
        try:
            while True:
                if monotonic() - self._booked >= BOOK_S:
                    self._booked = monotonic()
                    self._follow(self._book.sync().running)
                if monotonic() - self._asked >= STATUS_S:
                    self._look(served(self._host, self._proxy.tenants))
                    self._asked = monotonic()
                    self._admit()
                if not self._collect():
                    sleep(POLL_S)
        finally:
            for playing in self._playing.values():
                playing.feeder.cancel()

    # -- which jobs --------------------------------------------------------------------------------------------

    def _follow(self, running: Iterable[Entry]) -> None:
        entries = {entry.job.id: entry for entry in running}
        for id in self._playing.keys() - entries.keys():
            self._leave(id)
        for id in entries.keys() - self._playing.keys():
            with self._alone(id):
                self._playing[id] = self._begin(entries[id])

    def _begin(self, entry: Entry) -> Playing:
        config = entry.job.run(self._service)
        key = tenant_key(self._key, config.served_as)
        feeder = Feeder(config, self._client, self._url, self._pools, key, self._lease, f"{entry.job.id} ")
        feeder.begin()
        return Playing(entry, feeder, Usage(self._store, config.prefix))

    def _leave(self, id: str) -> None:
        playing = self._playing.pop(id)
        playing.usage.take(0, 0, at_once=True)
        playing.feeder.leave()

    def _alone(self, id: str) -> Alone:
        return Alone(lambda reason: self._fail(id, reason))

    def _fail(self, id: str, reason: str) -> None:
        """End a job; the others go on."""
        print(f"job {id} failed: {reason}", flush=True)
        if id in self._playing:
            self._leave(id)
        with suppress(JobRefused):  # somebody ended it before
            self._book.end(id, reason)

    def _room(self) -> int:
        """Trajectories that may be in flight: workers may come and go. Where all are away, as many as before."""
        if self._service.trajectories is not None:
            return self._service.trajectories
        return min(LARGE, int(slots(self._client).get(HardwareClass.CPU, 0))) or self._most

    # -- what may start ----------------------------------------------------------------------------------------

    def _look(self, status: ServiceStatus) -> None:
        now = monotonic()
        if now - self._loaded >= LOAD_S:
            self._loaded = now
            self._most = self._room()
            self._concurrency.resize(self._most)
            self._concurrency.look(self._load(status.engine))
        for id, playing in list(self._playing.items()):
            with self._alone(id):
                self._look_at(playing, status, now)

    def _look_at(self, playing: Playing, status: ServiceStatus, now: float) -> None:
        tenant = status.tenants.get(playing.feeder.config.served_as)
        serving = None if tenant is None else tenant.serving
        if tenant is None or serving is None:
            playing.wanted = []
            self._wait(playing, now, None if tenant is None else tenant.trouble)
            return
        playing.troubled = None
        seen = (serving, tenant.head)
        if seen == playing.seen and now - playing.looked < LOOK_S * max(1.0, len(self._playing) / CROWD):
            return
        playing.seen, playing.looked, playing.since = seen, now, now
        playing.over = playing.feeder.trained()
        playing.wanted = [] if playing.over else playing.feeder.admissible(serving)

    def _wait(self, playing: Playing, now: float, trouble: str | None) -> None:
        """Nothing of it is served: for its trainer to make a version, or for the proxy to load it."""
        deadlines = self._service.deadlines
        playing.troubled = None if trouble is None else playing.troubled or now
        if playing.troubled is not None and now - playing.troubled > deadlines.start:
            raise RollmillError(f"its adapter is not served since {deadlines.start:g} s (deadlines.start): {trouble}")
        patience = deadlines.batch * len(self._playing)  # the others' turns at the trainer may come before its own
        if now - playing.since > patience:
            raise DeadlineExceeded(f"no version of it was committed within {patience:g} s (deadlines.batch x jobs)")

    def _load(self, engine: dict[str, Any]) -> Load:
        each = engine.get("engines", [engine])
        usage = max((one.get("kv_usage", 0.0) for one in each), default=0.0)
        waiting = engine.get("waiting", 0) + engine.get("queued", 0)
        return Load(self._in_flight, waiting, engine.get("preempted", 0), usage)

    @property
    def _in_flight(self) -> int:
        return sum(playing.feeder.in_flight for playing in self._playing.values())

    def _admit(self) -> None:
        if self._rounds is not None:
            self._rounds.look({id: p.seen[0] for id, p in self._playing.items() if not p.over})
        demands = {
            id: Demand(len(p.wanted) * p.feeder.members, p.feeder.in_flight, p.feeder.members)
            for id, p in self._playing.items()
            if p.wanted and self._fits(p) and (self._rounds is None or self._rounds.may(id, p.seen[0]))
        }
        if demands:  # spares are more or fewer as failures are seen
            self._concurrency.need(max(demand.together for demand in demands.values()))
            self._start(demands)
        self._tell_line()

    def _fits(self, playing: Playing) -> bool:
        """Whether a group of it has room; what is free would be kept for one that has not for ever."""
        job = playing.entry.job
        playing.feeder.room = min(self._most, job.quota or self._most)
        if job.group > self._most and not playing.too_large:
            print(f"job {job.id}: a group of {job.group} is above the {self._most} that may run at once", flush=True)
        playing.too_large = job.group > self._most
        return not playing.too_large

    def _start(self, demands: Mapping[str, Demand]) -> None:
        free = self._concurrency.limit - self._in_flight
        if free <= 0:
            return
        waiting = sum(playing.complete for playing in self._playing.values())
        entitled = shares(playing.entry for playing in self._playing.values())
        found = allot(free, demands, entitled, waiting, self._passed_over)
        self._passed_over.note({id: count // demands[id].together for id, count in found.items()}, demands)
        for id, count in found.items():
            playing = self._playing[id]
            serving = playing.seen[0]
            assert serving is not None
            groups = count // demands[id].together
            with self._alone(id):
                playing.feeder.start(playing.wanted[:groups], serving)
                playing.wanted = playing.wanted[groups:]

    def _tell_line(self) -> None:
        """Tell the trainers who stands in line, so that their desks do not take it for a rollout that gives nothing."""
        now = monotonic()
        found = frozenset(id for id, playing in self._playing.items() if playing.stands_in_line(now))
        if found != self._in_line:
            self._in_line = found
            self._tell()

    def _tell(self) -> None:
        self._arrivals.tell({id: playing.arrivals for id, playing in self._playing.items()}, self._in_line)

    def _collect(self) -> int:
        """Take what ended; how many groups that were."""
        count, arrived = 0, False
        for id, playing in list(self._playing.items()):
            with self._alone(id):
                feeder = playing.feeder
                before = (feeder.generated_tokens, feeder.sealed)
                ended = feeder.collect(0.0)
                playing.usage.take(feeder.generated_tokens - before[0], feeder.sealed - before[1])
                if ended:
                    count += ended
                    playing.looked = 0.0
                    if playing.fed:
                        playing.arrivals += 1
                        arrived = True
                budget = playing.entry.job.budget
                if budget is not None and playing.usage.tokens >= budget:
                    raise BudgetSpent(f"it has generated {playing.usage.tokens} tokens; its budget is {budget}")
        if arrived:
            self._tell()
        return count


def slots_of(service: ServiceConfig) -> int:
    """Sequences that the engines decode together."""
    external = len(getattr(service.engine, "external", ()))
    return service.engine.max_batch * max(1, sum(service.engine.counts.values()) + external)


def main(service_file: Path, scheduler: str, proxy_url: str) -> None:
    """Run the rollout of a service as a process of its own."""
    die_with_parent()
    quiet_failures()
    service = loads_as(ServiceConfig, service_file.read_text())
    most = service.trajectories or int(getattr(service.pools, "cpu", LARGE))
    runner: Any = ThreadPoolTaskRunner(max_workers=most // 2 + 8)  # a thread for each group, of two at least
    lease = run_key(service.host, dumps(service.host), proxy_url)
    try:
        flow = rollout.with_options(task_runner=runner)
        run_flow(flow, service.name, str(service_file), scheduler, proxy_url, lease)
    except RollmillError as error:
        last_words("rollout", error)
        raise SystemExit(NAMED) from None


if __name__ == "__main__":
    leaving(lambda: typer.run(main))
