"""The local endpoint as a child of this process.

Invariants: it answers when `__init__` returns, or there is a named error and nothing is left running; it ends with
this process, however that ends.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from time import monotonic, sleep

from infra.compute.lifeline import reason, spawn, stop
from infra.serverless.bundle import Bundle
from infra.serverless.errors import ServerlessError
from infra.services.processes import free_port

PERIOD_S = 0.05
PREFIX = "rollmill-reward"


class LocalHost:
    """A running endpoint at `url`. `home` holds the code's links and, in `logs/`, a log for each function."""

    def __init__(
        self, bundle: Bundle, home: Path, concurrency: int, idle_s: float, deadline_s: float, s3_url: str | None = None
    ):
        bundle.check()
        port = free_port(set())
        self.url = f"http://127.0.0.1:{port}"
        home.mkdir(parents=True, exist_ok=True)
        self._files = [home / f"endpoint-{port}{end}" for end in (".json", ".log", ".error")]
        wanted, log, _ = self._files
        tree = {"functions": json.loads(bundle.manifest), "packages": bundle.packages, "requires": bundle.requires}
        wanted.write_text(json.dumps(tree))
        argv = ["infra.serverless.local", str(wanted), str(home), str(port), PREFIX, str(concurrency), str(idle_s)]
        # It bundles what this process can import, a reward in the current directory included.
        environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if s3_url:
            environment["AWS_ENDPOINT_URL_S3"] = s3_url
        self._child = spawn(argv, log, environment)
        try:
            self._wait(port, log, deadline_s)
        except BaseException:
            self.close()
            raise

    def _wait(self, port: int, log: Path, deadline_s: float) -> None:
        end = monotonic() + deadline_s
        while self._child.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                pass
            if monotonic() > end:
                raise ServerlessError(f"the local functions did not answer within {deadline_s:g} s; {reason(log)}")
            sleep(PERIOD_S)
        raise ServerlessError(f"the local functions ended with code {self._child.returncode}; {reason(log)}")

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def close(self) -> None:
        """End it with all its processes."""
        stop(self._child)
        for path in self._files:
            path.unlink(missing_ok=True)
