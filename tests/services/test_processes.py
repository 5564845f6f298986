"""Which process is which."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from infra.services.processes import MARK, Identity, is_service

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEP, env=os.environ | {MARK: "s3@/somewhere"}) as child:
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
    assert is_service(psutil.Process(child.pid)) and not is_service(psutil.Process())
