"""A run on the servers of `deploy/docker-compose.yaml`: Prefect and MLflow as it starts them, on a real PostgreSQL."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlflow import MlflowClient

from infra.services.endpoints import Endpoints
from infra.services.processes import free_port
from tests.command_line import Rollmill
from tests.deploy.test_deploy import compose
from tests.flows.test_runs import audit

BIN = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
START_S = 180.0
SECRET = "not-a-secret"

pytestmark = [
    pytest.mark.server,
    pytest.mark.full,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not BIN, reason="PostgreSQL is not installed (Debian and Ubuntu: apt-get install postgresql)"),
]


@contextmanager
def running(words: Sequence[str], ready: Callable[[], bool], log: Path, env: dict[str, str] | None = None):
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})})
    try:
        end = time.monotonic() + START_S
        while not ready():
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.3)
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[str]:
    """`host:port` of a server with the role and the databases that the file has."""
    as_user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    home = Path(tempfile.mkdtemp(prefix="rollmill-pg-", dir="/tmp"))  # which that user may enter
    if as_user:
        shutil.chown(home, "postgres", "postgres")
    port = free_port(set())
    sql = f"CREATE ROLE rollmill LOGIN PASSWORD '{SECRET}'; CREATE DATABASE prefect OWNER rollmill;"

    def call(*words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([*as_user, str(BIN[-1] / words[0]), *words[1:]], cwd=home, capture_output=True)

    try:
        made = call("initdb", "-D", str(home / "data"), "--auth-host=scram-sha-256", "--auth-local=trust")
        assert made.returncode == 0, made.stderr.decode()
        server = [*as_user, str(BIN[-1] / "postgres"), "-D", str(home / "data"), "-p", str(port), "-k", str(home)]
        there = ["-h", str(home), "-p", str(port), "-d", "postgres"]
        with running(server, lambda: call("pg_isready", *there).returncode == 0, tmp_path / "postgres.log"):
            for statement in [*filter(None, sql.split(";")), compose()["configs"]["databases"]["content"]]:
                done = call("psql", *there, "-v", "ON_ERROR_STOP=1", "-c", statement.strip())
                assert done.returncode == 0, done.stderr.decode()
            yield f"127.0.0.1:{port}"
    finally:
        shutil.rmtree(home, ignore_errors=True)


def started(service: dict[str, Any], port: int, places: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a service of the file, here: on loopback, at this port."""

    def here(text: str) -> str:
        for pattern, place in places.items():
            text = re.sub(pattern, lambda _, place=place: place, text)
        return text

    words = [here(word) for word in service["command"]]
    words = [str(port) if word in ("4200", "5000") else word.replace("--port=5000", f"--port={port}") for word in words]
    env = {name: here(str(value)) for name, value in service["environment"].items() if "AWS_" not in name}
    return [sys.executable, "-m", *words], env


def test_a_run_is_told_to_servers_on_postgresql(
    services: Endpoints,
    rollmill: Rollmill,
    postgres: str,
    tmp_path: Path,
) -> None:
    s3, tree = services.need_s3(), compose()["services"]
    prefect_port, mlflow_port = free_port(set()), free_port(set())
    places = {
        r"\$\{POSTGRES_PASSWORD:\?\}": SECRET,
        r"postgres:5432": postgres,
        r"http://s3:8333": s3.endpoint_url,
        r"0\.0\.0\.0": "127.0.0.1",
        r"127\.0\.0\.1:4200": f"127.0.0.1:{prefect_port}",
        r"127\.0\.0\.1:5000": f"127.0.0.1:{mlflow_port}",
        r"s3://rollmill/mlflow": f"s3://{s3.bucket}/postgres-mlflow",
    }
    api, uri = f"http://127.0.0.1:{prefect_port}/api", f"http://127.0.0.1:{mlflow_port}"

    def answers(address: str) -> Callable[[], bool]:
        def ask() -> bool:
            try:
                return httpx.get(address, trust_env=False, timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        return ask

    with ExitStack() as stack:
        for name, port, health in (
            ("prefect", prefect_port, f"{api}/health"),
            ("mlflow", mlflow_port, f"{uri}/health"),
        ):
            words, env = started(tree[name], port, places)
            env |= {"PREFECT_HOME": str(tmp_path / name)}
            stack.enter_context(running(words, answers(health), tmp_path / f"{name}.log", env))
        there = Rollmill(rollmill.home, rollmill.env | {"PREFECT_API_URL": api, "MLFLOW_TRACKING_URI": uri})
        code, output = there.train("on-postgres", "training.steps=3")
        assert code == 0, output
        audit(there, "on-postgres", 3)
        states = httpx.post(f"{api}/flow_runs/filter", json={}, trust_env=False, timeout=30).json()
        assert {r["name"]: r["state"]["type"] for r in states}["train on-postgres"] == "COMPLETED"
        versions = [v for v in MlflowClient(uri).search_model_versions() if "on-postgres" in v.name]
        assert sorted(int(v.tags["policy_version"]) for v in versions) == [0, 1, 2, 3]
    assert not list(tmp_path.rglob("*.db")), "PostgreSQL holds it all"
