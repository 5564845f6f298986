"""The queue in front of MLflow (against a stand-in that fails on demand), and the projection itself (against a
real MLflow server)."""

from __future__ import annotations

import logging
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from infra.services.endpoints import Endpoints
from infra.tracking.run import QUEUE, Tracker
from infra.tracking.server import RUN_TAG, MlflowRun, Rejected
from rl.config.load import validate
from rl.config.run import RunConfig
from rl.ledger import Ledger
from rl.records import Record, Rollback, StateRef, Step

DEADLINE = 60.0
CLOSED = "http://127.0.0.1:9"


def config(name: str, **tracking: Any) -> RunConfig:
    tree = {
        "name": name,
        "model": {"warmstart": {}},
        "domains": [{"name": "lake", "environment": "frozen_lake"}],
        "tracking": {"experiment": "tests", **tracking},
    }
    return validate(tree, "test")


def state(lsn: int) -> StateRef:
    return StateRef(prefix=f"state/{lsn:010d}-ab12/", manifest_sha256="f" * 64, full=lsn % 2 == 0)


def step(version: int, base: int | None = None) -> Step:
    """Version v at record v + 2, on the version before unless told."""
    base = version - 1 if base is None and version else base
    metrics = {"reward": version / 10, "lag_max": 1.0, "span_train_start": 1.0, "dropped_stale": 2.0}
    return Step(
        lsn=version + 2, nonce=str(version), writer="t", time=1000.0 + version, version=version, base=base,
        state=state(version + 2), weights_sha256="0", alpha=1, metrics=metrics if version else {},
    )  # fmt: skip


class Stub:
    """Stands in for the server: notes what arrives; `fail` raises what it is told to, call by call."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.arrived: list[tuple[Any, ...]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> None:
            self.gate.wait(DEADLINE)
            if self.failures and method != "finish":
                raise self.failures.pop(0)
            self.arrived.append((method, *arguments))

        return call


def test_entries_arrive_in_order_and_closing_waits_for_them() -> None:
    stub = Stub()
    tracker = Tracker(stub)  # type: ignore[arg-type]
    for at in range(20):
        tracker.log_step(at, {"reward": 1.0})
    assert tracker.close(DEADLINE)
    assert tracker.close(DEADLINE), "closing twice is the same"
    assert [call[:2] for call in stub.arrived] == [("log_metrics", at) for at in range(20)] + [("finish",)]


def test_a_failed_entry_is_tried_again_before_the_next() -> None:
    stub = Stub(ConnectionError("away"), TimeoutError("slow"))
    tracker = Tracker(stub)  # type: ignore[arg-type]
    tracker.log_step(1, {})
    tracker.log_step(2, {})
    assert tracker.close(DEADLINE)
    assert [call[1] for call in stub.arrived if call[0] == "log_metrics"] == [1, 2]


def test_a_refused_entry_is_dropped_alone_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    stub = Stub(Rejected("bad name"), Rejected("bad name"))
    tracker = Tracker(stub)  # type: ignore[arg-type]
    for at in (1, 2, 3):
        tracker.log_step(at, {})
    assert not tracker.close(DEADLINE)
    assert tracker.dropped == 2
    assert [call[1] for call in stub.arrived if call[0] == "log_metrics"] == [3]
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


def test_a_full_queue_drops_and_never_blocks(caplog: pytest.LogCaptureFixture) -> None:
    stub = Stub()
    stub.gate.clear()
    tracker = Tracker(stub)  # type: ignore[arg-type]
    for at in range(QUEUE + 50):
        tracker.log_step(at, {})
    assert 48 <= tracker.dropped <= 50
    stub.gate.set()
    assert not tracker.close(DEADLINE)
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


@pytest.mark.slow
def test_a_server_that_is_away_costs_nothing_but_metrics() -> None:
    with socket.socket() as unused:  # bound and not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        tracker = Tracker.start(config("away", uri=f"http://127.0.0.1:{unused.getsockname()[1]}"), "trainer")
        tracker.log_step(1, {"reward": 0.5})
        tracker.log_version(1, state(3), {"reward": 0.5})
        assert not tracker.close(2.0)
        assert tracker.dropped >= 3


@pytest.mark.parametrize("tracking", [{"enabled": False, "uri": CLOSED}, {"enabled": True}])
def test_without_a_server_all_calls_do_nothing(
    tracking: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    tracker = Tracker.start(config("off", **tracking), "trainer")
    tracker.log_step(1, {"reward": 0.5})
    tracker.log_artifact(tmp_path / "missing.png")
    tracker.rebuild([step(0), step(1)])
    assert tracker.close(0.0)
    assert list(tmp_path.iterdir()) == []


# -- a real server -------------------------------------------------------------------------------------


class Seen:
    """What MLflow has of a run."""

    def __init__(self, settings: RunConfig) -> None:
        assert settings.tracking.uri is not None
        run = MlflowRun(settings, settings.tracking.uri, owner=False)
        self.client = run.client
        where = f"tags.`{RUN_TAG}` = '{settings.tenant}/{settings.name}'"
        self.runs = self.client.search_runs([run.experiment_id], where)
        self.run = self.runs[0]
        self.id = self.run.info.run_id
        self.model = run.model
        found = self.client.search_model_versions(f"name = '{run.model}'")
        self.versions = {v.tags["policy_version"]: v for v in found}
        assert len(self.versions) == len(found), "a version was registered twice"
        self.models = self.client.search_logged_models([run.experiment_id], f"source_run_id = '{self.id}'")

    def history(self, name: str) -> dict[int, float]:
        points = self.client.get_metric_history(self.id, name)
        assert len({p.step for p in points}) == len(points), "a step was logged twice"
        return {p.step: p.value for p in points}

    def head(self) -> str:
        return str(self.client.get_model_version_by_alias(self.model, "head").tags["policy_version"])


@pytest.mark.server
@pytest.mark.slow
def test_a_run_its_versions_and_its_artifacts_are_logged(services: Endpoints, tmp_path: Path) -> None:
    settings = config("whole", uri=services.mlflow_uri)
    picture = tmp_path / "reward.png"
    picture.write_bytes(b"png")
    tracker = Tracker.start(settings, "trainer")
    for version in (1, 2):
        tracker.log_step(version, {**step(version).metrics, "bad": float("nan")})
        tracker.log_version(version, state(version + 2), step(version).metrics)
    tracker.log_artifact(picture)
    tracker.log_artifact(tmp_path / "missing.png")
    tracker.close(DEADLINE)
    assert tracker.dropped == 1, "the missing file"
    seen = Seen(settings)
    assert seen.run.info.status == "FINISHED"
    assert seen.run.data.params["staleness.alpha"] == "1"
    assert seen.history("reward/mean") == {1: 0.1, 2: 0.2}
    assert seen.history("offpolicy/dropped/stale") == {1: 2.0, 2: 2.0}
    assert not [name for name in seen.run.data.metrics if "span" in name or "bad" in name]
    assert {a.path for a in seen.client.list_artifacts(seen.id)} == {"config.json", "reward.png"}
    assert seen.versions.keys() == {"1", "2"}
    newest = seen.versions["2"]
    assert newest.tags["lsn"] == "4"
    assert newest.source == "s3://rollmill/default/whole/state/0000000004-ab12/"
    assert newest.run_id == seen.id
    assert {m.name for m in seen.models} == {"default-whole-v1", "default-whole-v2"}
    assert seen.head() == "2"
    assert seen.client.get_model_version_by_alias(seen.model, "latest").tags["policy_version"] == "2"


@pytest.mark.server
@pytest.mark.slow
def test_a_restart_goes_on_in_the_same_run_and_logs_what_is_missing_once(services: Endpoints) -> None:
    settings = config("again", uri=services.mlflow_uri)
    first = Tracker.start(settings, "trainer")
    first.log_step(1, step(1).metrics)
    first.log_version(1, state(3), step(1).metrics, lsn=3)
    assert first.close(DEADLINE)
    records: list[Record] = [step(0), step(1), step(2), step(3)]
    after = Ledger()
    after.head = 2
    records.append(Rollback(lsn=6, nonce="r", writer="t", time=1.0, to=2, snapshot=after.snapshot()))
    for _ in range(2):
        again = Tracker.start(settings, "trainer")
        again.rebuild(records)
        assert again.close(DEADLINE)
    seen = Seen(settings)
    assert len(seen.runs) == 1
    assert seen.history("reward/mean") == {1: 0.1, 2: 0.2, 3: 0.3}
    assert seen.versions.keys() == {"0", "1", "2", "3"}
    assert len(seen.models) == 4
    assert seen.head() == "2", "the head of the live line, not the newest"


@pytest.mark.server
@pytest.mark.slow
def test_roles_that_start_at_once_share_one_run(services: Endpoints) -> None:
    settings = config("shared", uri=services.mlflow_uri)
    trackers = [Tracker.start(settings, role) for role in ("trainer", "rollout", "report")]
    for at, tracker in enumerate(trackers):
        tracker.log_step(at, {"rollout_idle": at / 10})
    assert all(tracker.close(DEADLINE) for tracker in trackers)
    seen = Seen(settings)
    assert len(seen.runs) == 1
    assert seen.history("rollout/idle") == {0: 0.0, 1: 0.1, 2: 0.2}
