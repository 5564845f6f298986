"""S3 servers that are not ours, each in a process of its own on a free loopback port, gone at the end."""

from __future__ import annotations

import contextlib
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from infra.services import processes
from infra.services.service import HOST, Launch, environment, url
from infra.services.supervisor import tail
from infra.store.mooncake import RDMA

DEADLINE_S = 60.0
MINISTACK = Path(sys.prefix) / "share" / "rollmill" / "ministack"
"""Where `make ministack` puts it: it wants another botocore than ours."""


@contextlib.contextmanager
def ministack(home: Path) -> Iterator[str]:
    """The address of a ministack, in memory."""
    if not MINISTACK.exists():
        pytest.fail("ministack is not installed: run `make ministack`")
    port = processes.free_port(set())
    env = environment(
        PYTHONPATH=str(MINISTACK),
        GATEWAY_PORT=str(port),
        BIND_HOST=HOST,
        SERVICES="s3",
        LOG_LEVEL="WARNING",
        TMPDIR=str(home),
    )
    with _running(Launch([sys.executable, "-m", "ministack"], env, home), "ministack", port):
        yield url(port)


@contextlib.contextmanager
def rclone(home: Path, key: str, secret: str) -> Iterator[str]:
    """The address of rclone's S3 server over a directory."""
    port = processes.free_port(set())
    (home / "files").mkdir()
    program = Path(sysconfig.get_path("scripts")) / "rclone"
    argv = [
        str(program),
        "serve",
        "s3",
        str(home / "files"),
        "--addr",
        f"{HOST}:{port}",
        "--auth-key",
        f"{key},{secret}",
    ]
    env = environment(RCLONE_CONFIG=str(home / "rclone.conf"), RCLONE_CACHE_DIR=str(home / "cache"))
    with _running(Launch(argv, env, home), "rclone", port):
        yield url(port)


@contextlib.contextmanager
def _running(launch: Launch, name: str, port: int) -> Iterator[None]:
    if setpriv := shutil.which("setpriv"):  # Linux: nothing is left behind when the tests are killed, either
        launch = replace(launch, argv=[setpriv, "--pdeathsig", "KILL", *launch.argv])
    log = launch.cwd / f"{name}.log"
    leader = processes.spawn(launch, data_dir=launch.cwd, name=name, log=log)
    try:
        end = time.monotonic() + DEADLINE_S
        while not _answers(url(port)):
            if leader.process() is None or time.monotonic() > end:
                pytest.fail(f"{name} did not start:\n{tail(log)}")
            time.sleep(0.1)
        yield
    finally:
        processes.end(launch.cwd, name, leader, grace_s=5.0)


def _answers(address: str) -> bool:
    with httpx.Client(trust_env=False, timeout=5.0) as client, contextlib.suppress(httpx.HTTPError):
        client.get(address)
        return True
    return False


@contextlib.contextmanager
def mooncake_master(home: Path) -> Iterator[str]:
    """host:port of a Mooncake master."""
    taken: set[int] = set()
    rpc, metrics = processes.free_port(taken), processes.free_port(taken)
    argv = [
        str(Path(sysconfig.get_path("purelib")) / "mooncake" / "mooncake_master"),
        f"--rpc_address={HOST}",
        f"--rpc_port={rpc}",
        f"--metrics_host={HOST}",
        f"--metrics_port={metrics}",
    ]
    with _running(Launch(argv, environment(LD_LIBRARY_PATH=str(RDMA)), home), "mooncake", metrics):
        yield f"{HOST}:{rpc}"
