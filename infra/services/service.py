"""What an embedded service is, and what all of them share.

Invariants: every server listens on loopback only; all its files lie under `<data_dir>/<name>`; it reports
nothing to anybody outside; nothing of the caller's PREFECT_*, MLFLOW_* or AWS_* environment reaches it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from infra.services.endpoints import NO_TELEMETRY

HOST = "127.0.0.1"
# The services may not see settings meant for clients: a server with PREFECT_API_URL set would talk to itself.
_PRIVATE_PREFIXES = ("PREFECT_", "MLFLOW_", "_MLFLOW_", "AWS_", "S3_", "WEED_")


@dataclass(frozen=True)
class Launch:
    """A command ready to be spawned. `env` is complete (it replaces the caller's)."""

    argv: list[str]
    env: dict[str, str]
    cwd: Path


@dataclass(frozen=True)
class Service:
    """One service. `launch` and `probe` get the data directory, the port and the ports in `inner_ports`. `probe`
    returns None when the service is ready, else the reason why not; it waits 5 s at most, but for the first time
    ever, when it also prepares what the service needs."""

    name: str
    title: str
    default_port: int
    flag: str
    deadline_s: float
    launch: Callable[[Path, int, dict[str, int]], Launch]
    probe: Callable[[Path, int, dict[str, int]], str | None]
    inner_ports: tuple[str, ...] = field(default=())
    grace_s: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""


def url(port: int, path: str = "") -> str:
    return f"http://{HOST}:{port}{path}"


def environment(**ours: str) -> dict[str, str]:
    """The complete environment of a service: the caller's without what is meant for clients, and `ours`."""
    base = {k: v for k, v in os.environ.items() if not k.upper().startswith(_PRIVATE_PREFIXES)}
    return base | NO_TELEMETRY | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"} | ours


def directory(data_dir: Path, name: str) -> Path:
    """The directory of a service's files; made, if missing."""
    home = data_dir / name
    home.mkdir(parents=True, exist_ok=True)
    return home
