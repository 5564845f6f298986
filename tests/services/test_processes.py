"""Which process is which."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from infra.services.processes import MARK, Identity, mark_of

SLEEP = [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(60)"]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """One that runs: for a moment after its start the kernel shows no environment yet."""
    with subprocess.Popen(SLEEP, env=os.environ | {MARK: "s3@/somewhere"}, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("seconds", [-3600, -1, 1, 3600])
@pytest.mark.skipif(not psutil.LINUX, reason="elsewhere the kernel keeps the time itself")
def test_a_clock_that_is_set_makes_nobody_another(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    identity, booted = Identity.of(psutil.Process(child.pid)), psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted + seconds)
    assert psutil.boot_time() == booted + seconds
    found = identity.process()
    assert found is not None and found.pid == child.pid


def test_another_of_the_same_pid_is_another(child: subprocess.Popen[bytes]) -> None:
    identity = Identity.of(psutil.Process(child.pid))
    assert dataclasses.replace(identity, began=identity.began - 1).process() is None
    assert dataclasses.replace(identity, boot="another start").process() is None
    child.kill()
    child.wait()
    assert identity.process() is None


def test_a_service_is_told_by_its_mark(child: subprocess.Popen[bytes]) -> None:
    assert mark_of(psutil.Process(child.pid)) == "s3@/somewhere" and mark_of(psutil.Process()) is None
