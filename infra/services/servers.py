"""All embedded services by name; Prefect and MLflow: command, environment, and how one knows that they are ready.

Settings marked "measured" were measured by this project, on the version in parentheses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx

from infra.services import endpoints, seaweed, state
from infra.services.service import HOST, Launch, Service, directory, environment, url

START_S = 300.0
"""For a Python server to start: seconds where the machine is idle, minutes where it is not."""
EVENTS_S = 900
"""How long Prefect keeps the events of task runs. Their states, which the UI shows, stay with the task runs."""
TASK_RUN_STATES = ("Pending", "Running", "Completed", "Failed", "Crashed", "Cancelled")
PREFECT_SETTINGS = {
    # Measured (3.9.1): 10 recorded task runs per second with the defaults, 40 to 70 with these.
    **{
        f"PREFECT_SERVER_SERVICES_{service}_{key}": value
        for service in ("TASK_RUN_RECORDER", "EVENT_PERSISTER")
        for key, value in {"BATCH_SIZE": "200", "READ_BATCH_SIZE": "200", "FLUSH_INTERVAL": "1"}.items()
    },
    # 17 KB per task run: without retention the database only grows. Seconds; 14 days.
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(14 * 86400),
    # Measured (3.9.1): four fifths of that are events, of use to automations only, which take them at once.
    "PREFECT_SERVER_SERVICES_DB_VACUUM_EVENT_RETENTION_OVERRIDES": json.dumps(
        dict.fromkeys((f"prefect.task-run.{state}" for state in TASK_RUN_STATES), EVENTS_S)
    ),
    "PREFECT_SERVER_SERVICES_DB_VACUUM_LOOP_SECONDS": str(EVENTS_S // 3),
}
"""What a Prefect server wants for our load, wherever it runs (deploy/ has the same)."""
ARTIFACTS = "_mlflow"
"""Prefix of MLflow's artifacts in the bucket. No tenant is called so."""


def _http_probe(address: str) -> str | None:
    try:
        # trust_env=False: a proxy in the environment must not answer for a loopback server.
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            answer = client.get(address)
    except httpx.HTTPError as error:
        return f"{address}: {type(error).__name__}"
    return None if answer.status_code == 200 else f"{address}: HTTP {answer.status_code}"


# --- Prefect ----------------------------------------------------------------------------------------------


def _launch_prefect(data_dir: Path, port: int, inner: dict[str, int]) -> Launch:
    home = directory(data_dir, "prefect")
    env = environment(
        PREFECT_HOME=str(home),
        PREFECT_SERVER_DATABASE_CONNECTION_URL=f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        # Host and port also as settings: the UI learns its API's address from them, not from the flags.
        PREFECT_SERVER_API_HOST=HOST,
        PREFECT_SERVER_API_PORT=str(port),
        PREFECT_SERVER_UI_ENABLED="true",
        PREFECT_SERVER_LOGGING_LEVEL="WARNING",
        **PREFECT_SETTINGS,
    )
    argv = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)]
    return Launch(argv, env, home)


def _probe_prefect(data_dir: Path, port: int, inner: dict[str, int]) -> str | None:
    return _http_probe(url(port, "/api/health"))


# --- MLflow -----------------------------------------------------------------------------------------------


def _launch_mlflow(data_dir: Path, port: int, inner: dict[str, int]) -> Launch:
    home = directory(data_dir, "mlflow")
    destination, access = _artifacts(data_dir, home)
    # Measured (3.17.2): job execution costs 1.8 GB of memory and nothing here uses it.
    env = environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false", **access)
    argv = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    argv += ["--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}"]
    argv += ["--artifacts-destination", destination]
    return Launch(argv, env, home)


def _artifacts(data_dir: Path, home: Path) -> tuple[str, dict[str, str]]:
    """Where MLflow keeps artifacts, and the variables that let it: in the S3 server of this data directory, a
    directory where there is none. Clients go through MLflow's server and need no credentials for it."""
    s3 = state.load(data_dir).get("s3")
    if s3 is None or s3.identity is None:
        return str(home / "artifacts"), {}
    at = seaweed.endpoint(data_dir, s3.port)
    variables = endpoints.environment(endpoints.Endpoints(data_dir, data_dir, s3=at))
    return f"s3://{at.bucket}/{ARTIFACTS}", {k: v for k, v in variables.items() if k.startswith("AWS_")}


def _probe_mlflow(data_dir: Path, port: int, inner: dict[str, int]) -> str | None:
    return _http_probe(url(port, "/health"))


SERVICES: dict[str, Service] = {
    "s3": Service("s3", "S3 (SeaweedFS)", 8333, "--s3-port", 60.0, seaweed.launch, seaweed.probe, seaweed.INNER_PORTS),
    "prefect": Service("prefect", "Prefect", 4200, "--prefect-port", START_S, _launch_prefect, _probe_prefect),
    "mlflow": Service("mlflow", "MLflow", 5000, "--mlflow-port", START_S, _launch_mlflow, _probe_mlflow),
}
"""All services by name, in the order in which they are shown."""
