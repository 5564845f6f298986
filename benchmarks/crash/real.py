"""Kills in a real run: `rollmill train` on the smallest model, with its flows, engine, trainer and workers.

    train --steps far -> wait a moment, SIGKILL one to three of its processes -> ... -> SIGKILL the driver, resume
                      -> after the last kill resume with two steps to go, to a natural end -> audit

Invariant: the harness reads the store and sends signals; it starts nothing again but the driver, which is what a user
would do. Everything else comes back by itself, or the run ends and the benchmark says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import monotonic, sleep

import psutil

from infra.services import supervisor
from infra.services.endpoints import environment
from infra.store.audit import Audit, audit
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection
from rl.errors import DeadlineExceeded, RollmillError

NAME = "crash-real"
PREFIX = f"default/{NAME}/"
SETTINGS = (
    f"name={NAME}",
    "model.warmstart.demonstrations=200",
    "model.warmstart.max_steps=20",
    "training.groups_per_step=4",
    "training.group_size=4",
    "training.checkpoint_every=3",
    "training.dynamic_sampling=false",
    "evaluation.problems=0",
    "engine.max_batch=32",
    "tracking.enabled=false",
    "pools={type: local, cpu: 64, lambda: 8}",
    "restarts={rollout: 1000, trainer: 1000, engine: 1000}",
)
"""A hardly warmed-up model: whether it learns is no matter here."""
FAR = 100_000
MOMENT_S = (0.0, 4.0)
"""Before a blow; before every second one, on average, a new version is waited for, so that the run gets on."""
PATIENCE_S = 30.0
BLOW = (1, 1, 2, 3)
"""How many parts one blow hits: what dies together comes back together, which is harder, and takes no longer."""
APART_S = (0.0, 1.0)
"""Between the kills of one blow."""
DRIVER = "driver"
VICTIMS = {"rollout": "flows.rollout", "learn": "flows.learn", "trainer": "infra.training.main"}
"""Parts that are told by their command line. `engine` and `worker` are the workers of the pools."""
WEIGHTS = {"trainer": 6, "rollout": 4, "engine": 4, "learn": 3, "worker": 2, DRIVER: 2}
START_S = 600.0
END_S = 600.0
LEFT_S = 60.0
"""For what a killed driver started to end by itself."""


class RunEnded(RollmillError):
    """The run did not survive a kill: it ended by itself."""


@dataclass
class Outcome:
    """What happened, and what the store says of it."""

    audit: Audit
    kills: Counter[str] = field(default_factory=Counter)


class Run:
    """The driver process and everything below it."""

    def __init__(self, home: Path, env: dict[str, str], *settings: str) -> None:
        self._home, self._env, self._settings = home, env, (*SETTINGS, *settings)
        self._log = CommitLog(ObjectStore.connect(StoreSection()), PREFIX, "harness")
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: dict[int, psutil.Process] = {}
        self.witnessed: dict[str, str] = {}
        """Every record that was ever seen: key -> nonce."""

    def start(self, steps: int, resume: bool) -> None:
        chosen = [part for setting in (*self._settings, f"training.steps={steps}") for part in ("--set", setting)]
        command = [sys.executable, "-m", "flows.cli", "train", "frozen_lake", *chosen]
        command += ["--resume"] if resume else []
        with (self._home / "train.log").open("ab") as output:
            self._process = subprocess.Popen(
                command, env=self._env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def begin(self) -> None:
        """Start the run, which is to go on for long, and wait for its first step. Raises RunEnded, DeadlineExceeded."""
        self.start(FAR, resume=False)
        if not self.watch(START_S, 1):
            raise DeadlineExceeded(f"version 1 was not there within {START_S:g} s")

    def head(self) -> int:
        """Newest version, -1 before the first; notes the records on the way."""
        while (record := self._log.read(self._log.ledger.lsn + 1)) is not None:
            self._log.ledger.apply(record)
            self.witnessed[f"{PREFIX}log/{record.lsn:010d}.json"] = record.nonce
        return -1 if self._log.ledger.head is None else self._log.ledger.head

    def find(self, part: str) -> psutil.Process | None:
        """A living process of this part."""
        assert self._process is not None
        if part == DRIVER:
            return psutil.Process(self._process.pid)
        below = self._below()
        if part in VICTIMS:
            return next((p for p in below if VICTIMS[part] in _command(p)), None)
        workers = [p for p in below if _is_worker(p)]
        return next((p for p in workers if _has_torch(p) == (part == "engine")), None)

    def kill(self, part: str) -> bool:
        """SIGKILL a process of this part, if one is there."""
        with suppress(psutil.Error):
            if (victim := self.find(part)) is not None:
                victim.kill()
                if part == DRIVER:
                    assert self._process is not None
                    self._process.wait()
                return True
        return False

    def watch(self, seconds: float, version: int | None = None) -> bool:
        """Let it run so long, or until this version is there; whether it is. Raises RunEnded."""
        end = monotonic() + seconds
        while True:
            self.check()
            if there := version is not None and self.head() >= version:
                return there
            if monotonic() > end:
                return False
            sleep(0.1)

    def check(self) -> None:
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            raise RunEnded(f"the run ended with code {code}:\n{self._tail()}")
        self._below()

    def wait(self) -> None:
        """For the natural end. Raises RunEnded or DeadlineExceeded."""
        assert self._process is not None
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(f"the resumed run did not end within {END_S:g} s:\n{self._tail()}") from None
        if code != 0:
            raise RunEnded(f"the resumed run ended with code {code}:\n{self._tail()}")

    def stop(self) -> list[str]:
        """End what is left. What outlived its driver by more than `LEFT_S`, by its command line."""
        if self._process is not None and self._process.poll() is None:
            self.check()
            self._process.kill()
            self._process.wait()
        end = monotonic() + LEFT_S
        while (left := [p for p in self._seen.values() if _alive(p)]) and monotonic() < end:
            sleep(0.1)
        told = [" ".join(_command(p))[:200] for p in left]
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        return told

    def _below(self) -> list[psutil.Process]:
        assert self._process is not None
        with suppress(psutil.Error):
            found = psutil.Process(self._process.pid).children(recursive=True)
            self._seen |= {p.pid: p for p in found}
            return found
        return []

    def _tail(self) -> str:
        return (self._home / "train.log").read_text(errors="replace")[-3000:]


def run(kills: int, seed: int, say: Callable[[str], None]) -> Outcome:
    """`kills` kills in one real run, on services of its own. Raises RunEnded or DeadlineExceeded."""
    chance, done, began = Random(seed), Counter[str](), monotonic()
    with services() as (home, env):
        live = Run(home, env)
        try:
            live.begin()
            while sum(done.values()) < kills:
                if chance.random() < 0.5:
                    live.watch(PATIENCE_S, live.head() + 1)
                live.watch(chance.uniform(*MOMENT_S))
                for part in blow(chance, kills - sum(done.values())):
                    if not live.kill(part):
                        continue  # not there just now
                    done[part] += 1
                    number = sum(done.values())
                    say(f"real kill {number} after {monotonic() - began:.0f} s: {part}, at version {live.head()}")
                    if part != DRIVER:
                        live.watch(chance.uniform(*APART_S))
                    elif number < kills:
                        live.start(FAR, resume=True)
            steps = live.head() + 2
            live.start(steps, resume=True)
            live.wait()
            if live.head() < steps:
                raise RunEnded(f"the resumed run ended at version {live.head()}, not {steps}")
        finally:
            left = live.stop()
        if left:
            raise RunEnded(f"these processes outlived their run by {LEFT_S:g} s: {left}")
        return Outcome(audit(ObjectStore.connect(StoreSection()), PREFIX, live.witnessed), done)


def blow(chance: Random, left: int) -> list[str]:
    """The parts to kill next, in order, when so many kills are left. The driver comes last in a blow, for what it
    started ends with it; and as the very last of all."""
    if left == 1:
        return [DRIVER]
    parts = sorted(WEIGHTS, key=lambda part: chance.expovariate(WEIGHTS[part]))[: min(chance.choice(BLOW), left - 1)]
    return sorted(parts, key=lambda part: part == DRIVER)


@contextmanager
def services() -> Iterator[tuple[Path, dict[str, str]]]:
    """S3 and Prefect in a directory of their own; this process's environment names them too."""
    with TemporaryDirectory(prefix="rollmill-crash-") as name:
        home = Path(name)
        before = dict(os.environ)
        try:
            ours = environment(supervisor.up(home, supervisor.AUTO, ["s3", "prefect"]))
            ours |= {"ROLLMILL_HOME": str(home / "rollmill"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
            ours["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:9"  # tracking is off: nothing is to be started for it
            os.environ.update(ours)
            yield home, {**os.environ, **ours}
        finally:
            os.environ.clear()
            os.environ.update(before)
            supervisor.down(home)


def _alive(process: psutil.Process) -> bool:
    """One that nobody has waited for yet is over, too."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _is_worker(process: psutil.Process) -> bool:
    """Whether it is a worker of a local pool: a child that a nanny spawned."""
    return any("spawn_main" in argument for argument in _command(process))


def _has_torch(process: psutil.Process) -> bool:
    try:
        return any("libtorch" in m.path for m in process.memory_maps())
    except psutil.Error:
        return False
