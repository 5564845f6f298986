"""`python -m infra.proxy.main CONFIG HOST PORT WORK_DIR [--service SERVICE]`: the proxy of a fleet, as a process.

Invariants: it ends with the task that started it, whatever ends that; its keys are in the environment alone.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from infra.compute.lifeline import NAMED, die_with_parent, last_words
from infra.proxy.auth import Keys
from infra.proxy.secret import CONTROL_KEY, ROLLOUT_KEY
from infra.proxy.serve import serve
from rl.config.load import loads, loads_as
from rl.config.tenants import ServiceConfig
from rl.errors import RollmillError


def main(
    config_file: Path,
    host: str,
    port: int,
    work_dir: Path,
    service_file: Annotated[Path | None, typer.Option("--service")] = None,
) -> None:
    """Serve until told to end: the run of the configuration, or the jobs of a service."""
    die_with_parent()
    keys = Keys(os.environ.pop(CONTROL_KEY), os.environ.pop(ROLLOUT_KEY))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        service = None if service_file is None else loads_as(ServiceConfig, service_file.read_text())
        serve(loads(config_file.read_text()), host, port, work_dir, stop, keys, service)
    except RollmillError as error:
        last_words("proxy", error)
        raise SystemExit(NAMED) from None


if __name__ == "__main__":
    typer.run(main)
