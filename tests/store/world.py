"""Processes around a store in memory, any of which may die, be cut off or be overtaken at any object operation.

Nothing but the server outlives a crash: what died is built anew from the store alone. What was only given up goes on as
a zombie. `check` reads the log as an auditor does; `finish` lets healthy processes work off whatever is outstanding.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.crash.standin import FAILURES, Rollout, Trainer, Witness
from infra.store.audit import Audit, audit
from infra.store.errors import Overtaken, StoreUnavailable
from infra.store.gc import Collector
from infra.store.log import CommitLog
from rl import records
from rl.account import Account
from rl.errors import Fenced, LogCorrupt
from rl.records import Mark
from rl.retention import Retention
from rl.selection import DropPolicy
from rl.staleness import StalenessPolicy
from rl.trajectory import Uid
from tests.store.memory_s3 import Crash, Fate, MemoryS3, Wire

PREFIX = "tenant/run/"
GRACE_S = 60.0
"""Of garbage collection."""
LIVE = 2
"""Trainers and producers of each kind that go on at once: one, and one that was given up."""


class Idle(Exception):
    """The trainer would wait for a batch."""


@dataclass(frozen=True)
class Plan:
    """What befalls a process: at which of its operations from now, or of its creates, for these are where processes
    meet; and who acts there if it is MEANWHILE."""

    at: int
    fate: Fate
    other: str = ""
    salt: int = 0
    creates_only: bool = False


@dataclass
class Process:
    """A trainer or a producer with its own connection."""

    store: Witness
    part: Any
    doubtful: bool = False
    """Its last write may or may not have been done: it must not go on, and it will try."""


@dataclass
class World:
    """One run's server and processes."""

    policy: StalenessPolicy
    drops: DropPolicy
    retention: Retention
    checkpoint_every: int
    work: Path
    server: MemoryS3 = field(default_factory=MemoryS3)
    acknowledged: dict[str, str] = field(default_factory=dict)
    trainers: list[Process] = field(default_factory=list)
    producers: list[Process] = field(default_factory=list)
    account: Account = field(default_factory=Account)
    born: int = 0
    acting: list[Witness] = field(default_factory=list)
    """Connections of the processes that are at work, each in the midst of the one before."""

    # -- processes -----------------------------------------------------------------------------------

    def store(self) -> Witness:
        wire = Wire(self.server)
        return Witness(wire, "memory", self.acknowledged.__setitem__, clock=wire.clock, pause=wire.pause)

    def name(self, kind: str) -> str:
        self.born += 1
        return f"{kind}-{self.born}"

    def suffer(self, store: Witness, work: Callable[[], Any], plan: Plan | None) -> BaseException | None:
        """Let a process work while something befalls it. Returns by what it ended, among what the protocol foresees."""
        if plan is not None:
            store.client.at(plan.at, plan.fate, lambda: self.meanwhile(plan.other, plan.salt), plan.creates_only)
        end: BaseException | None = None
        self.acting.append(store)
        try:
            work()
        except (Crash, StoreUnavailable, Fenced, Overtaken) as error:
            end = error
        except Idle:
            pass
        self.acting.pop()
        store.client.spare()
        self.check()
        return end

    def new_trainer(self, plan: Plan | None = None) -> None:
        """A trainer takes over. The one before, if it lives, knows nothing of it."""
        store, name = self.store(), self.name("trainer")
        work = self.work / name
        work.mkdir()

        def idle(seconds: float) -> None:
            store.client.pause(seconds)
            raise Idle

        def make() -> None:
            made = Trainer(
                store, PREFIX, name, self.policy, self.drops, work, self.checkpoint_every, 1e9, store.client.clock, idle
            )
            self.trainers = [*self.trainers, Process(store, made)][-LIVE:]

        self.suffer(store, make, plan)

    def train(self, process: Process, work: Callable[[Trainer], Any], plan: Plan | None = None) -> None:
        """A trainer does something, and ends if that fails; one that is in doubt or fenced may try again."""
        trainer: Trainer = process.part
        end = self.suffer(process.store, lambda: work(trainer), plan)
        if isinstance(end, Fenced):
            assert process.doubtful or self.account.writer != trainer.log.writer, f"nobody took over, but: {end}"
        if isinstance(end, StoreUnavailable):
            process.doubtful = True
        elif isinstance(end, Crash | Overtaken) and process in self.trainers:
            self.trainers.remove(process)

    def new_producer(self) -> None:
        """A rollout side starts. The one before, if it lives, goes on."""
        store = self.store()
        made = Process(store, Rollout(store, PREFIX, self.name("producer"), self.policy, self.drops))
        self.producers = [*self.producers, made][-LIVE - 1 :]

    def produce(self, process: Process, work: Callable[[Rollout], Any], plan: Plan | None = None) -> None:
        end = self.suffer(process.store, lambda: work(process.part), plan)
        if end is not None and process in self.producers:  # what it had in flight is gone with it
            self.producers.remove(process)

    def settle(self, salt: int, plan: Plan | None = None) -> None:
        """An operator gives up an attempt that is open as far as he knows."""
        store = self.store()

        def work() -> None:
            log = CommitLog(store, PREFIX, self.name("operator"))
            ledger = log.sync()
            near = [uid for _, uid in zip(range(8), ledger.outstanding(), strict=False)]
            log.append_settle([self.drops.drop(ledger, near[salt % len(near)], FAILURES[salt % len(FAILURES)])])

        self.suffer(store, work, plan)

    def collect(self, plan: Plan | None = None) -> None:
        """Somebody collects garbage."""
        store = self.store()
        log = CommitLog(store, PREFIX, self.name("collector"))
        self.suffer(store, lambda: Collector(log, PREFIX, self.retention, GRACE_S).collect(), plan)

    def retain(self, mark: Mark, salt: int, plan: Plan | None = None) -> None:
        """An operator pins, unpins or deletes a version, if it may be."""
        store = self.store()

        def work() -> None:
            log = CommitLog(store, PREFIX, self.name("operator"))
            there = sorted(log.sync().states)
            if not there:
                return
            version = there[salt % len(there)]
            with suppress(LogCorrupt):
                log.append_retain(version, mark, log.ledger.states[version] if mark is Mark.PIN else None)

        self.suffer(store, work, plan)

    def meanwhile(self, other: str, salt: int) -> None:
        """Somebody acts in the midst of another's work."""
        trainers = [process for process in self.trainers if process.store not in self.acting]
        producers = [process for process in self.producers if process.store not in self.acting]
        if other == "takeover":
            self.new_trainer()
        elif other == "settle":
            self.settle(salt)
        elif other == "collect":
            self.collect()
        elif other == "retain":
            self.retain(list(Mark)[salt % 3], salt)
        elif other == "train" and trainers:
            self.train(trainers[-1], lambda t: t.step())
        elif other == "roll back" and trainers:
            self.roll_back(trainers[-1], salt)
        elif other == "seal" and producers:
            self.produce(producers[salt % len(producers)], lambda p: seal(p, salt, at_once=1 + salt % 3))

    def roll_back(self, process: Process, salt: int, plan: Plan | None = None) -> None:
        def work(trainer: Trainer) -> None:
            ledger = trainer.log.sync()
            trainer.roll_back(ledger.line[salt % len(ledger.line)])

        self.train(process, work, plan)

    # -- what must hold ------------------------------------------------------------------------------

    def check(self) -> None:
        """Read what is new in the log, beside all processes, and find nothing wrong with it."""
        while (entry := self.server.objects.get(f"{PREFIX}log/{self.account.lsn + 1:010d}.json")) is not None:
            self.account.note(records.decode(entry[0]))
        assert not self.account.findings, self.account.findings
        assert not any("/log/" in key for key in self.server.deleted)

    def audit(self) -> Audit:
        """The whole audit, with every acknowledgement that any process ever got."""
        found = audit(self.store(), PREFIX, self.acknowledged)
        assert not found.findings, "\n".join(map(str, found.findings))
        return found

    def finish(self) -> None:
        """Healthy processes settle every ordinal that was ever spoken of or sealed, so none is lost from sight."""
        self.new_trainer()
        self.new_producer()
        trainer, producer = self.trainers[-1], self.producers[-1]
        top = max([uid.ordinal for p in self.producers for uid in p.part.in_flight], default=0)
        top = max([top, *(uid.ordinal for uid in self.account.fates)])
        for _ in range(300):
            ledger = trainer.part.log.sync()
            if ledger.low_water > top:
                return
            self.produce(producer, play_all)
            self.train(trainer, lambda t: t.step())
            assert trainer in self.trainers and producer in self.producers
        raise AssertionError(f"ordinals up to {top} are not settled: {list(self.account.outstanding())}")


def start(producer: Rollout, behind: int) -> None:
    """Start what the bound allows, by engines that are some versions behind the head."""
    ledger = producer.look()
    if ledger.head is not None:
        producer.start(ledger.line[max(0, len(ledger.line) - 1 - behind)])


def seal(producer: Rollout, salt: int, at_once: int) -> None:
    """End some of what is in flight: whole, flat or given up, alone or several in one segment."""
    flying = sorted(producer.in_flight)
    if not flying:
        return
    first = flying[salt % len(flying)]
    head = producer.log.sync().head or 0
    text = f"{producer.writer} {salt}".encode()
    if salt % 7 == 6:
        producer.give_up(first, FAILURES[salt % len(FAILURES)])
    elif at_once == 1:
        producer.admit(first, head, salt % 5 == 4, text)
    else:
        alike = [uid for uid in flying if producer.in_flight[uid] == producer.in_flight[first]]
        producer.seal(alike[:at_once], head, salt % 5 == 4, text)


def seal_twice(producer: Rollout, uids: list[Uid], salt: int) -> None:
    """A zombie that was restarted elsewhere ends the same groups, by its old view of the world."""
    ledger = producer.log.ledger
    start_version = ledger.head or 0
    producer.in_flight |= dict.fromkeys(uids, start_version)
    producer.seal(uids, start_version, False, f"again {salt}".encode())


def play_some(producer: Rollout, count: int) -> None:
    """End so many of those in flight well, with the last tokens by the newest version."""
    head = producer.log.sync().head or 0
    for uid in sorted(producer.in_flight)[:count]:
        producer.admit(uid, head, False, b"late")


def play_all(producer: Rollout) -> None:
    """Start and end everything, well."""
    start(producer, 0)
    for uid in sorted(producer.in_flight):
        producer.admit(uid, 0, False, b"well")

