"""Ranks end with their launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from infra.compute.lifeline import LIFELINE
from infra.training.launch import launch

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0
LAUNCHER = """
import sys
from infra.compute.lifeline import die_with_parent
from infra.training.launch import launch
die_with_parent()
sys.exit(launch(2, "tests.training.idle_rank", sys.argv[1:]))
"""


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "condition did not come true"
        time.sleep(0.05)


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.parametrize("watched", [True, False], ids=["by a worker", "by hand"])
def test_ranks_are_gone_after_kill_9_of_the_launcher(tmp_path: Path, watched: bool) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({LIFELINE: "1"} if watched else {})
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)], cwd=ROOT, env=environment, stdin=subprocess.PIPE
    )
    ranks: list[psutil.Process] = []
    try:
        wait_until(lambda: len(list(tmp_path.glob("*.ready"))) == 2)
        ranks = [psutil.Process(int(path.read_text())) for path in tmp_path.glob("*.ready")]
        assert all(os.getpgid(rank.pid) == rank.pid for rank in ranks)  # the launcher's session does not hold them
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
        wait_until(lambda: all(map(gone, ranks)))
    finally:
        launcher.kill()
        launcher.wait()
        for rank in ranks:
            if not gone(rank):
                rank.kill()


@pytest.mark.slow
def test_the_exit_code_is_that_of_the_ranks(tmp_path: Path) -> None:
    """And stdin and the environment are as before."""
    before = os.fstat(0)
    assert launch(2, "tests.training.idle_rank", [str(tmp_path), "3"]) == 3
    assert os.path.samestat(os.fstat(0), before) and LIFELINE not in os.environ
