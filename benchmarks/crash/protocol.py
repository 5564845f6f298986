"""Kills among many light processes around one real server: the whole protocol, with made-up episodes and weights.

    start all -> N times: wait a moment, SIGKILL one (sometimes two, sometimes the server), start it again
              -> let the rest settle what is outstanding -> stop all -> audit

Sometimes the trainer is frozen instead while a successor takes over, and thawed: a zombie, which must end as fenced.
Victims, moments and work are drawn from one seed; the interleaving is the machine's.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from time import monotonic, sleep

from benchmarks.crash.worker import Post, main
from infra.compute.lifeline import FENCED, NAMED
from infra.services import state, supervisor
from infra.store.audit import Audit, audit
from infra.store.buffer import SampleBuffer
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection

PREFIX = "crash/protocol/"
ROLES = ("producer", "producer", "producer", "trainer", "operator", "collector", "reader")
MOMENT_S = (0.0, 1.0)
"""Between two kills."""
SETTLE_S = 120.0
"""For the rest of the run to settle all that is outstanding when the last one was killed."""
ZOMBIE_S = 120.0


@dataclass
class Outcome:
    """What happened, and what the store says of it."""

    kills: Counter[str] = field(default_factory=Counter)
    """By role."""
    zombies: int = 0
    audit: Audit | None = None
    stuck: list[str] = field(default_factory=list)
    """Problems that nobody settled any more."""
    failures: list[str] = field(default_factory=list)
    """Workers that ended by themselves in a way that is not foreseen."""


class Crew:
    """The living workers."""

    def __init__(self, home: Path, environment: dict[str, str], chance: Random) -> None:
        self._work, self._environment, self._chance = home / "workers", environment, chance
        self._work.mkdir()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.crash.worker"])
        self._born = 0
        self.living: list[tuple[Post, BaseProcess]] = []
        self.failures: list[str] = []

    def start(self, role: str) -> tuple[Post, BaseProcess]:
        self._born += 1
        post = Post(role, f"{role}-{self._born}", self._chance.getrandbits(32), PREFIX, self._work)
        process = self._context.Process(target=main, args=(post, self._environment), name=post.name)
        process.start()
        self.living.append((post, process))
        return post, process

    def kill(self, victims: list[tuple[Post, BaseProcess]]) -> None:
        """SIGKILL, all before any is waited for."""
        for _, process in victims:
            process.kill()
        for victim in victims:
            victim[1].join()
            self.living.remove(victim)

    def tend(self) -> None:
        """Start again what ended by itself; note what should not have."""
        for post, process in list(self.living):
            if process.exitcode is None:
                continue
            self.living.remove((post, process))
            if process.exitcode not in (FENCED, NAMED):
                self.failures.append(f"{post.name} ended with code {process.exitcode}: {post.log.read_text()[-2000:]}")
            if not any(other.role == post.role for other, _ in self.living) or post.role == "producer":
                self.start(post.role)

    def acknowledged(self) -> dict[str, str]:
        """Every creation that any worker was told of: key -> nonce."""
        lines = [line for path in self._work.glob("*.journal") for line in path.read_text().splitlines(keepends=True)]
        return dict(line.split() for line in lines if line.endswith("\n"))


def run(kills: int, seed: int, home: Path, environment: dict[str, str], say: Callable[[str], None]) -> Outcome:
    """`kills` kills on the server of the data directory `home`, which `environment` names too."""
    chance, outcome = Random(seed), Outcome()
    store = ObjectStore.connect(StoreSection())
    crew = Crew(home, environment, chance)
    try:
        for role in ROLES:
            crew.start(role)
        while (done := sum(outcome.kills.values())) < kills:
            sleep(chance.uniform(*MOMENT_S))
            crew.tend()
            what = chance.choices(("one", "two", "server", "zombie"), (66, 22, 6, 6))[0]
            if what == "zombie":
                outcome.zombies += _zombie(crew)
            elif what == "server":
                _kill_server(home)
                outcome.kills["server"] += 1
            else:
                victims = chance.sample(crew.living, min(2 if what == "two" else 1, kills - done))
                crew.kill(victims)
                for post, _ in victims:
                    outcome.kills[post.role] += 1
                    crew.start(post.role)
            if done // 50 < sum(outcome.kills.values()) // 50:
                say(f"{sum(outcome.kills.values())} of {kills} kills")
        outcome.stuck = _settle(store, crew)
    finally:
        crew.kill(list(crew.living))
    outcome.failures = crew.failures
    outcome.audit = audit(store, PREFIX, crew.acknowledged())
    return outcome


def _zombie(crew: Crew) -> int:
    """Freeze the trainer, let another take over, thaw it: it must learn that it was fenced. 1 when it did."""
    log = CommitLog(ObjectStore.connect(StoreSection()), PREFIX, "harness")
    before = log.sync().fence
    fence = log.read(before) if before else None
    # one that has not fenced yet would take over when it is thawed, and rightly so
    frozen = next((living for living in crew.living if fence is not None and living[0].name == fence.writer), None)
    if frozen is None:
        return 0
    post, process = frozen
    os.kill(process.pid, signal.SIGSTOP)  # type: ignore[arg-type]
    crew.living.remove(frozen)
    try:
        crew.start("trainer")
        log.wait_for(lambda ledger: ledger.fence > before, ZOMBIE_S, "the fence of a second trainer")
    finally:
        os.kill(process.pid, signal.SIGCONT)  # type: ignore[arg-type]
    process.join(ZOMBIE_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        crew.failures.append(f"{post.name} was fenced and went on")
    elif process.exitcode not in (FENCED, NAMED):
        crew.failures.append(f"{post.name} was fenced and ended with code {process.exitcode}: {post.log.read_text()}")
    return 1


def _kill_server(home: Path) -> None:
    identity = state.load(home)["s3"].identity
    assert identity is not None
    os.kill(identity.pid, signal.SIGKILL)
    supervisor.up(home, supervisor.AUTO, ["s3"])


def _settle(store: ObjectStore, crew: Crew) -> list[str]:
    """Until all ordinals are settled that were spoken of, or sealed, by now; those that never are."""
    log, buffer = CommitLog(store, PREFIX, "harness"), SampleBuffer(store, PREFIX)
    ledger = log.sync()
    sealed = [group.uid.ordinal for group in buffer.history(64)]
    top = max([ledger.low_water, *sealed, *ledger.settled_above, *ledger.attempts]) + 1
    end = monotonic() + SETTLE_S
    while log.sync().low_water < top:
        if monotonic() > end:
            return [str(uid) for _, uid in zip(range(top), log.ledger.outstanding(), strict=False)]
        crew.tend()
        sleep(0.1)
    return []
