"""Whole runs as a user starts them: the command line in a process of its own, real services."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from infra.services.endpoints import Endpoints, environment
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection
from rl.config.load import loads
from rl.config.run import RunConfig
from tests.store.runs import Run

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
        return self.home / "runs" / f"default-{name}"

    def config(self, name: str) -> RunConfig:
        newest = max(self.run_dir(name).glob("config-*.json"), key=lambda path: path.stat().st_mtime_ns)
        return loads(newest.read_text())

    def log(self, name: str) -> CommitLog:
        config = self.config(name)
        log = CommitLog(ObjectStore.connect(config.store), config.prefix, writer="test")
        log.sync()
        return log


@pytest.fixture(scope="session")
def rollmill(services: Endpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollmill]:
    home = tmp_path_factory.mktemp("home")
    ours = environment(services) | {"ROLLMILL_HOME": str(home), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ours.items():
            patch.setenv(name, value)
        yield Rollmill(home, {**os.environ, **ours})


@dataclass
class Desk:
    """Commands in this process, on a store in memory, and a run to use them on."""

    run: Run
    name: str

    def __call__(self, *arguments: str, sets: tuple[str, ...] = ()) -> Result:
        from flows.cli import app

        chosen = [a for value in (f"name={self.name}", "domains.0.name=maze", *sets) for a in ("--set", value)]
        return CliRunner().invoke(app, [*arguments, *chosen], env={"COLUMNS": "200"})

    def good(self, *arguments: str, sets: tuple[str, ...] = ()) -> str:
        result = self(*arguments, sets=sets)
        assert result.exit_code == 0, result.output
        return result.output

    def bad(self, *arguments: str, sets: tuple[str, ...] = ()) -> str:
        """The one line of an error."""
        result = self(*arguments, sets=sets)
        assert result.exit_code == 2 and "Traceback" not in result.output, result.output
        assert len(result.output.strip().splitlines()) == 1, result.output
        return result.output


@pytest.fixture
def desk(own_store: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("ROLLMILL_HOME", str(tmp_path / "home"))
    store = ObjectStore.connect(StoreSection())
    store.ensure_bucket()
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)[:60].strip("-")
    return Desk(Run(store, f"default/{name}/", tmp_path / "states"), name)
