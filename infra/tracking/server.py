"""One MLflow run, over HTTP: the blocking calls that `infra.tracking.run` makes from its thread.

Invariants: every method may be called again after it failed half-way; a request that MLflow refuses for what it
says raises Rejected, anything else may be tried again. Uses `MlflowClient` with explicit ids only: none of
MLflow's process-wide state (active run, tracking address), so that runs do not meet.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx

from infra.tracking.metrics import project
from infra.tracking.traces import request
from rl.config.load import dumps
from rl.config.run import RunConfig
from rl.errors import RollmillError
from rl.records import StateRef, Step
from rl.trajectory import Trajectory

RUN_TAG = "rollmill.run"
HEAD_ALIAS = "head"
ON_MODELS = ("reward/mean", "offpolicy/lag_max", "offpolicy/dropped")
"""Metrics that are shown with a version in the list of models."""
_STEPS = 10
"""Steps in one batch of a rebuild; MLflow takes 1000 metrics."""
_PARAMS = 100
_LONGEST_PARAM = 500
LONGEST_TAG = 5000
TRACE_S = 20.0
REFUSED = (400, 404, 413, 422, 501)


class Rejected(RollmillError):
    """MLflow refused an entry for its content; trying again would not help."""


class MlflowRun:
    """The MLflow run of a configuration, found or made at the first call."""

    def __init__(self, config: RunConfig, uri: str, owner: bool) -> None:
        self._config = config
        self._uri = uri
        self._owner = owner
        """Whether this process decides on the run's status."""
        self.model = f"{config.tenant}.{config.name}"
        self._system: Any = None

    @cached_property
    def client(self) -> Any:
        # Read by MLflow's HTTP layer at each request; its defaults wait for minutes, and we try again ourselves.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        return MlflowClient(tracking_uri=self._uri, registry_uri=self._uri)

    @cached_property
    def experiment_id(self) -> str:
        name = self._config.tracking.experiment
        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self.client.create_experiment(name))
        except Exception as error:
            if _code(error) != "RESOURCE_ALREADY_EXISTS":
                raise
            return str(self.client.get_experiment_by_name(name).experiment_id)

    @cached_property
    def run_id(self) -> str:
        run_id = self._find_run() or self._create_run()
        if self._owner:
            self.client.update_run(run_id, status="RUNNING")
        return run_id

    def _find_run(self) -> str | None:
        label = f"{self._config.tenant}/{self._config.name}"
        oldest = ["attributes.start_time ASC", "attributes.run_id ASC"]
        where = f"tags.`{RUN_TAG}` = '{label}'"
        runs = self.client.search_runs([self.experiment_id], where, max_results=1, order_by=oldest)
        return str(runs[0].info.run_id) if runs else None

    def _create_run(self) -> str:
        """Make the run; of several processes that do so at once, all go on with the oldest one."""
        label = f"{self._config.tenant}/{self._config.name}"
        tags = {RUN_TAG: label, "rollmill.tenant": self._config.tenant}
        mine = str(self.client.create_run(self.experiment_id, tags=tags, run_name=label).info.run_id)
        oldest = self._find_run() or mine
        if oldest != mine:
            self.client.delete_run(mine)
            return oldest
        from mlflow.entities import Param

        parameters = [Param(k, v) for k, v in flat(self._config.model_dump(mode="json", by_alias=True))]
        for at in range(0, len(parameters), _PARAMS):
            self.client.log_batch(mine, params=parameters[at : at + _PARAMS])
        self.client.log_text(mine, dumps(self._config), "config.json")
        return mine

    # -- jobs ----------------------------------------------------------------------------------------

    def log_metrics(self, step: int, figures: dict[str, float], at: float) -> None:
        """One batch of figures, at time `at` in seconds."""
        self._log(self._metrics(step, figures, at))

    def rebuild(self, steps: list[Step], head: int | None) -> None:
        """The figures and versions of those steps whose own are not there yet."""
        # Every trained step has a mean reward, and its batch was written whole.
        there = {m.step for m in self.client.get_metric_history(self.run_id, "reward/mean")}
        missing = [step for step in steps if step.metrics and step.version not in there]
        for at in range(0, len(missing), _STEPS):
            self._log([m for s in missing[at : at + _STEPS] for m in self._metrics(s.version, s.metrics, s.time)])
        for step in steps:
            self.log_version(step.version, step.lsn, step.state, step.metrics)
        if head is not None:
            self.set_head(head)

    def log_version(self, version: int, lsn: int, state: StateRef, figures: dict[str, float]) -> None:
        """One logged model and one model version, unless they are there."""
        self._ensure_model()
        tags = {"policy_version": str(version), "lsn": str(lsn)}
        if self._version_of(version) is None:
            address = f"s3://{self._config.store.bucket}/{self._config.prefix}{state.prefix}"
            self._request(
                self.client.create_model_version,
                self.model,
                source=address,
                run_id=self.run_id,
                tags={**tags, "manifest_sha256": state.manifest_sha256, "resumable": str(state.full).lower()},
                model_id=self._logged_model(version, tags, figures),
                await_creation_for=0,
            )

    def set_head(self, version: int) -> None:
        """Move the alias to this policy version."""
        found = self._version_of(version)
        if found is not None:
            self._request(self.client.set_registered_model_alias, self.model, HEAD_ALIAS, found)

    def log_artifact(self, path: Path) -> None:
        """Upload a file."""
        if not path.is_file():
            raise Rejected(f"artifact {path}: no such file")
        self._request(self.client.log_artifact, self.run_id, str(path))

    def set_tag(self, key: str, value: str) -> None:
        """Tag the run."""
        self._request(self.client.set_tag, self.run_id, key, value[:LONGEST_TAG])

    def log_trace(self, trajectory: Trajectory) -> None:
        """Send a trace; again, it is the same one."""
        headers = {
            "content-type": "application/x-protobuf",
            "x-mlflow-experiment-id": self.experiment_id,
            "x-mlflow-run-id": self.run_id,
        }
        body = request(self._config, trajectory)
        answer = httpx.post(f"{self._uri}/v1/traces", content=body, headers=headers, timeout=TRACE_S)
        if answer.status_code in REFUSED:
            raise Rejected(f"MLflow refused a trace: HTTP {answer.status_code} {answer.text[:200]}")
        answer.raise_for_status()

    def watch_system(self) -> None:
        """Log the machine's load until `finish`, going on where an earlier process ended."""
        if not self._config.tracking.system_metrics or self._system is not None:
            return
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        self._system = SystemMetricsMonitor(self.run_id, resume_logging=True, tracking_uri=self._uri)
        self._system.start()

    def known(self) -> tuple[str, str] | None:
        """(experiment id, run id), if the run is there; makes neither."""
        experiment = self.client.get_experiment_by_name(self._config.tracking.experiment)
        if experiment is None:
            return None
        self.experiment_id = str(experiment.experiment_id)
        run_id = self._find_run()
        return None if run_id is None else (self.experiment_id, run_id)

    def page(self) -> str:
        """Where MLflow shows the run; its first page where that can not be told."""
        try:
            found = self.known()
        except Exception:  # a view of what is there: no server, no run
            found = None
        return self._uri if found is None else f"{self._uri}/#/experiments/{found[0]}/runs/{found[1]}"

    def finish(self) -> None:
        """The end of the owner's process."""
        if self._system is not None:
            self._system.finish()
            self._system = None
        if self._owner:
            self.client.set_terminated(self.run_id)

    # -- parts ---------------------------------------------------------------------------------------

    def _metrics(self, step: int, figures: dict[str, float], at: float) -> list[Any]:
        from mlflow.entities import Metric

        return [Metric(name, value, int(at * 1000), step) for name, value in project(figures).items()]

    def _log(self, metrics: list[Any]) -> None:
        if metrics:
            self._request(self.client.log_batch, self.run_id, metrics=metrics)

    def _ensure_model(self) -> None:
        try:
            self.client.create_registered_model(self.model, tags={RUN_TAG: self._config.prefix.rstrip("/")})
        except Exception as error:
            if _code(error) != "RESOURCE_ALREADY_EXISTS":
                raise

    def _version_of(self, version: int) -> str | None:
        """The registered version that carries this policy version."""
        where = f"name = '{self.model}' AND tag.`policy_version` = '{version}'"
        found = self.client.search_model_versions(where, max_results=1)
        return str(found[0].version) if found else None

    def _logged_model(self, version: int, tags: dict[str, str], figures: dict[str, float]) -> str:
        """Id of the logged model of a version: external, for its files lie in the store."""
        from mlflow.entities import LoggedModelStatus

        name = f"{self._config.tenant}-{self._config.name}-v{version}"
        where = f"name = '{name}'"
        there = self.client.search_logged_models([self.experiment_id], where, max_results=1)
        if there:
            return str(there[0].model_id)
        shown = {k: f"{v:.6g}" for k, v in project(figures).items() if k in ON_MODELS}
        made = self.client.create_logged_model(
            self.experiment_id,
            name=name,
            source_run_id=self.run_id,
            tags={**tags, "mlflow.model.isExternal": "true"},
            params=shown,
            model_type="policy",
        )
        self.client.finalize_logged_model(made.model_id, LoggedModelStatus.READY)
        return str(made.model_id)

    @staticmethod
    def _request(call: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return call(*arguments, **named)
        except Exception as error:
            if _code(error) in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST"):
                raise Rejected(f"MLflow refused it: {error}") from error
            raise


def flat(tree: Any, prefix: str = "") -> list[tuple[str, str]]:
    """The leaves of a tree with their dotted paths, cut to what MLflow takes."""
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in flat(value, f"{prefix}{key}.")]
    if isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        return [leaf for at, value in enumerate(tree) for leaf in flat(value, f"{prefix}{at}.")]
    return [(prefix.rstrip("."), str(tree)[:_LONGEST_PARAM])]


def _code(error: Exception) -> str | None:
    return getattr(error, "error_code", None)
