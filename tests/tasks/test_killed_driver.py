"""No environment outlives its run, not even on somebody else's cluster when the driver is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest
from distributed import Scheduler, SpecCluster, Worker

from infra.compute import signals
from tests.tasks.bad_environments import CLOSED

SEED = 424_242


def closed() -> bool:
    return CLOSED[SEED] > 0


@pytest.mark.slow
def test_environments_are_closed_when_their_driver_was_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(signals, "LEASE_S", 3.0)
    monkeypatch.chdir(Path(__file__).parents[2])
    options = {"host": "127.0.0.1", "nthreads": 1, "resources": {"cpu": 1}, "dashboard": False}
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "port": 0, "dashboard": False}}
    with SpecCluster(workers={"cpu": {"cls": Worker, "options": options}}, scheduler=scheduler) as cluster:
        arguments = [cluster.scheduler_address, str(SEED), str(tmp_path)]
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.tasks.driver", *arguments], stdout=subprocess.PIPE, text=True
        )
        try:
            assert driver.stdout is not None and driver.stdout.readline() == "parked\n"
            held = monotonic() + 2 * signals.LEASE_S
            while monotonic() < held:  # as long as the driver lives, however long that is
                assert not closed()
                sleep(0.1)
        finally:
            driver.kill()
            driver.wait(10)
        end = monotonic() + 60
        while not closed() and monotonic() < end:
            sleep(0.1)
        assert CLOSED[SEED] == 1
