"""A Dask cluster that is somebody else's: a scheduler and one worker for each class, as processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep


@dataclass
class Foreign:
    address: str
    _scheduler: subprocess.Popen[bytes]

    def kill(self) -> None:
        """The scheduler alone."""
        self._scheduler.kill()
        self._scheduler.wait()


@contextmanager
def foreign_cluster(slots: dict[str, int]) -> Iterator[Foreign]:
    """`slots` by hardware class."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(part: str, *options: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", f"distributed.cli.dask_{part}", *options]
            with (home / f"{part}.log").open("ab") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, cwd=home)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        told = home / "scheduler.json"
        where = ["--host", "127.0.0.1", "--no-dashboard"]
        scheduler = start("scheduler", *where, "--port", "0", "--scheduler-file", str(told))
        end = monotonic() + 60
        while not told.exists() or not told.read_text().strip():
            assert monotonic() < end, (home / "scheduler.log").read_text()
            sleep(0.05)
        address = json.loads(told.read_text())["address"]
        for name, count in slots.items():
            given = ["--nthreads", str(count), "--resources", f"{name}={count}", "--no-nanny", "--memory-limit", "0"]
            start("worker", address, *where, *given)
        yield Foreign(address, scheduler)
