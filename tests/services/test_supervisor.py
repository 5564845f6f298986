"""The embedded services, for real: S3 alone where one service shows the behaviour, else all three."""

from __future__ import annotations

import dataclasses
import http.server
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from infra.services import processes, state, supervisor
from infra.services.endpoints import Endpoints, S3Endpoint, environment
from infra.services.errors import (
    PortChanged,
    PortInUse,
    ServiceDidNotStart,
    ServiceNotUp,
    ServicesBusy,
    StateUnreadable,
)
from infra.services.service import Launch
from infra.services.supervisor import AUTO, Ports

pytestmark = pytest.mark.server


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"
    supervisor.down(tmp_path / "home")


def pid_of(home: Path, name: str = "s3") -> int:
    identity = state.load(home)[name].identity
    assert identity is not None
    return identity.pid


def ours(home: Path) -> list[int]:
    """All processes that bear this home's mark, not found by the supervisor's own means."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(processes.MARK, "").endswith(f"@{home}"):
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def test_up_is_idempotent(home: Path) -> None:
    first = supervisor.up(home, AUTO, ["s3"])
    pid = pid_of(home)
    assert supervisor.up(home, AUTO, ["s3"]) == first
    assert supervisor.up(home, None, ["s3"]) == first
    assert pid_of(home) == pid


def test_down_leaves_no_process_and_keeps_the_data_and_the_address(home: Path) -> None:
    before = supervisor.up(home, AUTO, ["s3"]).need_s3()
    before.client().put_object(Bucket=before.bucket, Key="kept", Body=b"x" * 10_000)
    assert ours(home)
    assert supervisor.down(home) == ["s3"]
    assert ours(home) == []
    assert supervisor.down(home) == []
    after = supervisor.up(home, AUTO, ["s3"]).need_s3()
    assert after == before
    assert after.client().get_object(Bucket=after.bucket, Key="kept")["Body"].read() == b"x" * 10_000


def test_data_survive_sigkill(home: Path) -> None:
    s3 = supervisor.up(home, AUTO, ["s3"]).need_s3()
    bodies = {f"k/{i}": os.urandom(3000) for i in range(50)}
    for key, body in bodies.items():
        s3.client().put_object(Bucket=s3.bucket, Key=key, Body=body, IfNoneMatch="*")
    os.kill(pid_of(home), signal.SIGKILL)
    client = supervisor.up(home, AUTO, ["s3"]).need_s3().client(attempts=1)
    for key, body in bodies.items():
        assert client.get_object(Bucket=s3.bucket, Key=key)["Body"].read() == body
        with pytest.raises(client.exceptions.ClientError, match="PreconditionFailed"):
            client.put_object(Bucket=s3.bucket, Key=key, Body=b"", IfNoneMatch="*")


def test_data_survive_other_inner_ports(home: Path) -> None:
    """A stranger takes a port that only SeaweedFS itself used: it gets new ones and finds its volumes."""
    s3 = supervisor.up(home, AUTO, ["s3"]).need_s3()
    s3.client().put_object(Bucket=s3.bucket, Key="kept", Body=b"y" * 5000)
    supervisor.down(home)
    inner = state.load(home)["s3"].inner
    with stranger(inner["master.port"]):
        s3 = supervisor.up(home, AUTO, ["s3"]).need_s3()
        assert not set(state.load(home)["s3"].inner.values()) & set(inner.values())
        assert s3.client().get_object(Bucket=s3.bucket, Key="kept")["Body"].read() == b"y" * 5000
        supervisor.down(home)


class stranger:
    """A server that is not ours, on a port."""

    def __init__(self, port: int = 0) -> None:
        self.server = http.server.HTTPServer(("127.0.0.1", port), http.server.SimpleHTTPRequestHandler)
        self.port = int(self.server.server_address[1])

    def __enter__(self) -> int:
        return self.port

    def __exit__(self, *_: object) -> None:
        self.server.server_close()


def test_a_port_in_use_is_one_clear_error_and_nothing_starts(home: Path) -> None:
    with stranger() as port, pytest.raises(PortInUse) as caught:
        supervisor.up(home, Ports(s3=0, prefect=port), ["s3", "prefect"])
    text = str(caught.value)
    assert str(port) in text and f"pid {os.getpid()}" in text and "--prefect-port" in text
    assert ours(home) == []


def test_another_port_for_a_running_service_is_refused(home: Path) -> None:
    supervisor.up(home, AUTO, ["s3"])
    with pytest.raises(PortChanged, match="down"):
        supervisor.up(home, Ports(s3=processes.free_port(set())), ["s3"])


def test_a_reused_pid_is_never_killed(home: Path) -> None:
    supervisor.up(home, AUTO, ["s3"])
    supervisor.down(home)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        records = state.load(home)
        theirs = processes.Identity.of(psutil.Process(bystander.pid))
        records["s3"].identity = dataclasses.replace(theirs, began=theirs.began - 1000)
        state.save(home, records)
        assert supervisor.down(home) == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait(10)


def test_concurrent_ups_start_one_server(home: Path) -> None:
    code = (
        "import sys; from infra.services import supervisor as s;"
        "print(s.up(sys.argv[1], s.AUTO, ['s3']).need_s3().endpoint_url)"
    )
    root = Path(__file__).parents[2]
    runs = [
        subprocess.Popen([sys.executable, "-c", code, home], stdout=subprocess.PIPE, text=True, cwd=root)
        for _ in range(4)
    ]
    urls = {run.communicate(timeout=120)[0].strip() for run in runs}
    assert len(urls) == 1 and "" not in urls
    assert ours(home) == [pid_of(home)]


def test_a_held_lock_is_a_named_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOCK_TIMEOUT_S", 0.2)
    with supervisor.locked(home):
        thread_error: list[BaseException] = []

        def other() -> None:
            try:
                supervisor.down(home)
            except ServicesBusy as error:
                thread_error.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(10)
    assert thread_error


@pytest.mark.parametrize(
    ("program", "reason"), [("exit(3)", "exited"), ("time.sleep(60)", "not ready after")]
)
def test_a_server_that_does_not_start_shows_its_log(
    home: Path, monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    def launch(data_dir: Path, port: int, inner: dict[str, int]) -> Launch:
        code = f"import time; print('out of cheese', flush=True); {program}"
        return Launch([sys.executable, "-c", code], dict(os.environ), data_dir)

    broken = dataclasses.replace(supervisor.SERVICES["mlflow"], launch=launch, deadline_s=2.0)
    monkeypatch.setitem(supervisor.SERVICES, "mlflow", broken)
    with pytest.raises(ServiceDidNotStart, match=reason) as caught:
        supervisor.up(home, AUTO, ["s3", "mlflow"])
    assert "out of cheese" in str(caught.value) and "doctor" in caught.value.mend
    assert ours(home) == [pid_of(home, "s3")], "the healthy one goes on, of the other nothing is left"


def test_down_works_without_a_readable_state_file(home: Path) -> None:
    supervisor.up(home, AUTO, ["s3"])
    state.state_path(home).write_text("{half a fi")
    with pytest.raises(StateUnreadable):
        supervisor.up(home, AUTO, ["s3"])
    assert supervisor.down(home) == ["s3"]
    assert ours(home) == []


@pytest.mark.slow
def test_a_stopped_hung_server_is_seen_and_replaced(home: Path) -> None:
    supervisor.up(home, AUTO, ["s3"])
    hung = pid_of(home)
    os.kill(hung, signal.SIGSTOP)
    assert {s.name: s.state for s in supervisor.status(home)}["s3"] == "unhealthy"
    supervisor.up(home, AUTO, ["s3"])
    assert pid_of(home) != hung and not psutil.pid_exists(hung)


def test_the_credentials_are_private_and_needed(s3: S3Endpoint, home: Path) -> None:
    endpoint = supervisor.up(home, AUTO, ["s3"]).need_s3()
    assert stat.S_IMODE((home / "s3-credentials.json").stat().st_mode) == 0o600
    assert endpoint.secret_key not in repr(endpoint) and endpoint.secret_key != s3.secret_key
    wrong = S3Endpoint(endpoint.endpoint_url, endpoint.access_key, s3.secret_key).client(attempts=1)
    with pytest.raises(wrong.exceptions.ClientError, match=r"SignatureDoesNotMatch|AccessDenied"):
        wrong.list_objects_v2(Bucket=endpoint.bucket)


def test_everything_listens_on_loopback_only(services: Endpoints) -> None:
    family = {p.pid for n in supervisor.ALL for p in processes.family(services.data_dir, n, None)}
    listening = [c for c in psutil.net_connections("inet") if c.status == "LISTEN" and c.pid in family]
    assert len(listening) >= 3
    assert {c.laddr[0] for c in listening} == {"127.0.0.1"}


def test_status_and_the_memory_budget(services: Endpoints) -> None:
    found = supervisor.status(services.data_dir)
    assert [(s.name, s.state) for s in found] == [(n, "running") for n in supervisor.ALL]
    assert all(s.pid and s.uptime_s and s.log.exists() for s in found)
    assert sum(s.rss_bytes for s in found) < 1.3e9


def test_the_ui_reaches_its_api(services: Endpoints) -> None:
    settings = httpx.get(f"{services.prefect_ui_url}/ui-settings", trust_env=False, timeout=10).json()
    assert settings["api_url"] == services.prefect_api_url
    page = httpx.get(f"{services.mlflow_uri}/", trust_env=False, timeout=10)
    assert "MLflow" in page.text


def test_a_killed_service_alone_is_restarted(services: Endpoints) -> None:
    """MLflow, because its worker outlives a killed parent and holds the port: the remains must go first."""
    home = services.data_dir
    before = {name: pid_of(home, name) for name in supervisor.ALL}
    workers = [p.pid for p in psutil.Process(before["mlflow"]).children(recursive=True)]
    assert workers
    os.kill(before["mlflow"], signal.SIGKILL)
    deadline = time.monotonic() + 10
    while {s.name: s.state for s in supervisor.status(home)}["mlflow"] != "dead":
        assert time.monotonic() < deadline
    assert supervisor.up(home, AUTO) == services
    after = {name: pid_of(home, name) for name in supervisor.ALL}
    assert after.pop("mlflow") != before.pop("mlflow")
    assert after == before
    assert not any(psutil.pid_exists(pid) for pid in workers)


CLIENT = """
import json, boto3, mlflow
from prefect import flow
@flow
def hello(): return 1
hello()
mlflow.set_experiment("e")
with mlflow.start_run() as run:
    mlflow.log_metric("m", 1.0)
    mlflow.log_text("hi", "a.txt")
boto3.client("s3").put_object(Bucket="rollmill", Key="from-child", Body=b"1")
print(json.dumps({"run": run.info.run_id}))
"""


def test_the_environment_leads_child_processes_here(services: Endpoints, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "PREFECT_", "MLFLOW_"))}
    env |= environment(services) | {
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "HTTP_PROXY": "http://127.0.0.1:9",
    }
    child = subprocess.run(
        [sys.executable, "-c", CLIENT], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    run = json.loads(child.stdout.strip().splitlines()[-1])["run"]
    s3 = services.need_s3()
    assert s3.client().head_object(Bucket=s3.bucket, Key="from-child")
    kept = s3.client().list_objects_v2(Bucket=s3.bucket, Prefix="_mlflow/")["Contents"]
    assert any(found["Key"].endswith(f"{run}/artifacts/a.txt") for found in kept), "artifacts lie in S3"
    runs = httpx.post(f"{services.prefect_api_url}/flow_runs/count", json={}, trust_env=False, timeout=10)
    assert runs.json() >= 1
    assert not (tmp_path / "mlruns").exists() and not (tmp_path / "mlflow.db").exists()


def test_an_address_of_a_service_that_is_not_up_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(ServiceNotUp, match="rollmill up"):
        supervisor.endpoints(tmp_path).need_s3()
