"""A spawned process ends with its parent, whatever kills the parent."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from infra.compute.lifeline import spawn, stop, tail

PARENT = """
import sys, time
from pathlib import Path
from infra.compute.lifeline import spawn
child = spawn(['tests.compute.lifeline_child'], Path(sys.argv[1]))
print(child.pid, flush=True)
time.sleep(60)
"""


def wait_until(condition, deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "condition did not come true"
        time.sleep(0.02)


def test_the_child_is_gone_after_kill_9_of_its_parent(tmp_path):
    log = tmp_path / "child.log"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(log)], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    wait_until(lambda: log.exists() and "ready" in log.read_text())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_stop_ends_a_process_that_ignores_sigterm(tmp_path):
    log = tmp_path / "deaf.log"
    child = spawn(["tests.compute.lifeline_child", "deaf"], log)
    wait_until(lambda: log.exists() and "ready" in log.read_text())
    assert stop(child, grace_s=0.2) == -signal.SIGKILL


@pytest.mark.parametrize("text, last", [("", ""), ("a\nb\nc\n", "b\nc")])
def test_tail_is_the_end_of_the_log(tmp_path, text, last):
    path = tmp_path / "log"
    path.write_text(text)
    assert tail(path, 2) == last
