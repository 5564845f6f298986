"""Prefect's server goes away in mid-run and does not come back."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from infra.services import supervisor
from infra.services.endpoints import Endpoints, environment
from infra.services.state import load
from tests.command_line import Rollmill
from tests.flows.test_runs import audit, head, wait_until

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.timeout(1200)]

END_S = 420
"""From the last commit: what is not told to Prefect costs minutes, not hours."""


@pytest.fixture
def lone(services: Endpoints, rollmill: Rollmill, tmp_path: Path) -> Iterator[Rollmill]:
    """With a Prefect server of its own."""
    own = supervisor.up(tmp_path / "prefect", supervisor.AUTO, ["prefect"])
    api = {"PREFECT_API_URL": environment(own)["PREFECT_API_URL"]}
    try:
        yield Rollmill(rollmill.home, rollmill.env | api)
    finally:
        supervisor.down(tmp_path / "prefect")


def kill_prefect(home: Path) -> None:
    identity = load(home)["prefect"].identity
    assert identity is not None
    server = psutil.Process(identity.pid)
    for process in [*server.children(recursive=True), server]:
        os.kill(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("unit", ["group", "trajectory"])
def test_a_run_goes_on_to_its_end_without_prefect(lone: Rollmill, tmp_path: Path, unit: str) -> None:
    name, steps = f"without-prefect-{unit}", 8
    sets = (f"training.steps={steps}", f"rollout.unit={unit}", "evaluation.problems=8")
    process = lone.start(*lone.train_arguments(name, *sets))
    try:
        wait_until(lambda: head(lone, name) >= 2, "version 2")
        kill_prefect(tmp_path / "prefect")
        wait_until(lambda: head(lone, name) == steps, "the last version")
        began = time.monotonic()
        output, _ = process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        left = [p.cmdline() for p in psutil.Process(process.pid).children(recursive=True)]
        raise AssertionError(f"no end within {END_S} s of the last version; left: {left}") from None
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert "was not told that this ended" in output and "report:" in output, output
    assert time.monotonic() - began < END_S
    audit(lone, name, steps)


def test_a_part_that_dies_without_prefect_ends_the_run_by_name(lone: Rollmill, tmp_path: Path) -> None:
    """A part can not begin without the server; what is there is gone on with when it is back."""
    name = "part-without-prefect"
    sets = ("training.steps=60", "evaluation.problems=0")
    process = lone.start(*lone.train_arguments(name, *sets))
    try:
        wait_until(lambda: head(lone, name) >= 1, "version 1")
        kill_prefect(tmp_path / "prefect")
        for child in psutil.Process(process.pid).children(recursive=True):
            if "flows.learn" in child.cmdline():
                child.kill()
        output, _ = process.communicate(timeout=END_S)
    finally:
        process.kill()
    said = [line for line in output.splitlines() if line.startswith("error: ")]
    assert process.returncode == 2 and len(said) == 1 and "learn: Prefect's server at" in said[0], output
    reached = head(lone, name)
    assert 1 <= reached < 60
    own = supervisor.up(tmp_path / "prefect", which=["prefect"])
    again = Rollmill(lone.home, lone.env | {"PREFECT_API_URL": environment(own)["PREFECT_API_URL"]})
    code, output = again.train(name, f"training.steps={reached + 1}", "evaluation.problems=0", resume=True)
    assert code == 0, output
    audit(again, name, reached + 1)
