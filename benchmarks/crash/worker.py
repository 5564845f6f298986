"""The processes that are killed: producers, trainers, an operator, a collector and a reader, on a real server.

Invariants: a worker keeps nothing but the journal of what was acknowledged to it, one line per write, which no code but
the final audit reads; it ends with its parent; it ends by itself only when another trainer fenced it (exit code 3), a
foreseen error sends it back to the log (4), or something is wrong (1, with the reason in its log).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from random import Random
from time import monotonic, sleep

from benchmarks.crash.standin import FAILURES, Rollout, Trainer, Witness, restore
from infra.compute.lifeline import CRASHED, FENCED, NAMED
from infra.store import clients
from infra.store.errors import Overtaken, StoreUnavailable
from infra.store.gc import Collector
from infra.store.log import CommitLog
from rl.config.infrastructure import StoreSection
from rl.errors import Fenced, LogCorrupt
from rl.retention import Retention
from rl.selection import DropPolicy
from rl.staleness import StalenessPolicy

POLICY = StalenessPolicy(alpha=2, groups_per_step=3, examined_per_step=4)
DROPS = DropPolicy()
CHECKPOINT_EVERY = 3
PAUSE_S = 0.1
"""Between two looks at the store: the server and all its clients share this machine."""
DEADLINE_S = 120.0
RETENTION = Retention(newest=4)
GRACE_S = 30.0
"""Of garbage collection: longer than any worker is without a look at the log, on a busy machine too."""


@dataclass(frozen=True)
class Post:
    """What a worker is told: plain values, for it is a process of its own."""

    role: str
    name: str
    """Unique per process, so that no two writers ever share one."""
    seed: int
    prefix: str
    work: Path

    @property
    def journal(self) -> Path:
        return self.work / f"{self.name}.journal"

    @property
    def log(self) -> Path:
        return self.work / f"{self.name}.log"


class Worker:
    """One process."""

    def __init__(self, post: Post) -> None:
        section = StoreSection()
        self.post, self.chance = post, Random(post.seed)
        journal = os.open(post.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.store = Witness(
            clients.client(section), section.bucket, lambda key, nonce: _write(journal, f"{key} {nonce}\n")
        )
        self.files = post.work / post.name
        self.files.mkdir()

    def produce(self) -> None:
        """Start what the bound allows and end it in some order, with some failures, late tokens and copies."""
        rollout = Rollout(self.store, self.post.prefix, self.post.name, POLICY, DROPS)
        while wanted():
            ledger = rollout.look()
            if ledger.head is not None:
                behind = self.chance.choice((0, 0, 1))
                rollout.start(ledger.line[max(0, len(ledger.line) - 1 - behind)])
            flying = sorted(rollout.in_flight)
            for uid in self.chance.sample(flying, self.chance.randint(0, len(flying))):
                self._end(rollout, uid)
            sleep(PAUSE_S)

    def _end(self, rollout: Rollout, uid) -> None:
        if not rollout.log.ledger.is_open(uid):  # another producer was faster: an aborted generation
            del rollout.in_flight[uid]
            return
        text, head = self.chance.randbytes(16), rollout.log.sync().head or 0
        how = self.chance.choices(("admit", "seal", "flat", "fail"), (6, 2, 1, 1))[0]
        if how == "fail":
            rollout.give_up(uid, self.chance.choice(FAILURES))
        elif how == "seal":
            rollout.seal([uid], head, False, text)
        else:
            rollout.admit(uid, head, how == "flat", text)

    def train(self) -> None:
        """Step for ever; go back to an earlier version now and then."""
        trainer = Trainer(
            self.store, self.post.prefix, self.post.name, POLICY, DROPS, self.files, CHECKPOINT_EVERY, DEADLINE_S,
            monotonic, sleep,
        )  # fmt: skip
        while wanted():
            trainer.step()
            if self.chance.random() < 0.03:
                line = trainer.log.ledger.line
                trainer.roll_back(line[-self.chance.randint(1, min(4, len(line)))])

    def operate(self) -> None:
        """Give up a problem now and then, beside the trainer."""
        log = CommitLog(self.store, self.post.prefix, self.post.name)
        while wanted():
            ledger = log.sync()
            near = [uid for _, uid in zip(range(32), ledger.outstanding(), strict=False)]
            try:
                log.append_settle([DROPS.drop(ledger, self.chance.choice(near), self.chance.choice(FAILURES))])
            except Overtaken:
                continue
            sleep(self.chance.uniform(1.0, 5.0))

    def collect(self) -> None:
        """Collect garbage all the time."""
        log = CommitLog(self.store, self.post.prefix, self.post.name)
        while wanted():
            if log.sync().head is not None:
                Collector(log, self.post.prefix, RETENTION, GRACE_S).collect()
            sleep(self.chance.uniform(0.5, 2.0))

    def read(self) -> None:
        """Follow the log and load every version as it appears, as an engine does."""
        log, seen = CommitLog(self.store, self.post.prefix, self.post.name), -1
        while wanted():
            ledger = log.sync()
            if ledger.next_version <= seen:
                raise LogCorrupt(f"version {ledger.next_version - 1} appeared after {seen}")
            if ledger.head is not None and ledger.next_version - 1 > seen:
                restore(self.store, self.post.prefix, ledger.states[ledger.head], self.files)
                seen = ledger.next_version - 1
            sleep(PAUSE_S)


ROLES: dict[str, Callable[[Worker], None]] = {
    "producer": Worker.produce,
    "trainer": Worker.train,
    "operator": Worker.operate,
    "collector": Worker.collect,
    "reader": Worker.read,
}


def main(post: Post, environment: dict[str, str]) -> None:
    """Work until killed."""
    os.environ.update(environment)
    sys.stdout = sys.stderr = post.log.open("a")
    try:
        ROLES[post.role](Worker(post))
    except Fenced:
        sys.exit(FENCED)
    except (Overtaken, StoreUnavailable) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(NAMED)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        sys.exit(CRASHED)


def wanted() -> bool:
    """Whether the harness lives."""
    parent = parent_process()
    return parent is not None and parent.is_alive()


def _write(file: int, line: str) -> None:
    """One system call: what was written survives the writer."""
    os.write(file, line.encode())
