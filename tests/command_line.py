"""The command line as a user starts it: in a process of its own, with a home and services of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.config.load import loads
from rl.config.run import RunConfig

TINY = (
    "training.steps=4",
    "training.groups_per_step=4",
    "training.group_size=4",
    "evaluation.problems=8",
    "engine.max_batch=32",
    "pools={type: local, cpu: 64, lambda: 8}",
)
"""A run of seconds: frozen lake with the smallest model, warmed up once per session."""


@dataclass
class Rollmill:
    """The command line on its own home and services."""

    home: Path
    env: dict[str, str]

    @staticmethod
    def command(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "flows.cli", *arguments]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __call__(self, *arguments: str, timeout: float = 600) -> tuple[int, str]:
        process = self.start(*arguments)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"{arguments} did not end; so far:\n{process.communicate()[0]}") from None
        return process.returncode, output

    def train(self, name: str, *sets: str, resume: bool = False) -> tuple[int, str]:
        return self(*self.train_arguments(name, *sets, resume=resume))

    @staticmethod
    def train_arguments(name: str, *sets: str, resume: bool = False) -> list[str]:
        chosen = [argument for value in (f"name={name}", *TINY, *sets) for argument in ("--set", value)]
        return ["train", "frozen_lake", *chosen, *(["--resume"] if resume else [])]

    def run_dir(self, name: str) -> Path:
        return self.home / "runs" / f"default.{name}"

    def config(self, name: str) -> RunConfig:
        newest = max(self.run_dir(name).glob("config-*.json"), key=lambda path: path.stat().st_mtime_ns)
        return loads(newest.read_text())

    def log(self, name: str) -> CommitLog:
        config = self.config(name)
        log = CommitLog(ObjectStore.connect(config.store), config.prefix, writer="test")
        log.sync()
        return log
