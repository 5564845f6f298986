"""Whole runs: they learn, they survive kills, and what the log says holds."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

import httpx
import psutil
import pytest
from mlflow import MlflowClient

from flows.evaluations import load_all
from rl.ledger import Ledger
from rl.records import Step
from rl.trajectory import Uid
from tests.command_line import Rollmill

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]


def audit(rollmill: Rollmill, name: str, steps: int) -> list[Step]:
    """Fold the whole log anew and check what must hold after any run; the step records."""
    records = list(rollmill.log(name).records(1))
    alpha = rollmill.config(name).staleness.alpha
    ledger = Ledger()
    trained: set[int] = set()
    for record in records:
        if isinstance(record, Step):
            for segment in record.segments:
                lag = ledger.lag(int(segment.split("/")[1]))
                assert lag is not None and lag <= alpha, (record.version, segment, lag)
            for uid in map(Uid.parse, record.trained):
                assert uid.ordinal not in trained, f"ordinal {uid.ordinal} was trained twice"
                trained.add(uid.ordinal)
        ledger.apply(record)
    assert ledger.head == steps
    found = [r for r in records if isinstance(r, Step)]
    assert [s.version for s in found] == list(range(steps + 1))
    return found


def wait_until(condition: Callable[[], object], what: str, deadline_s: float = 300) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {deadline_s} s"
        time.sleep(0.1)


def head(rollmill: Rollmill, name: str) -> int:
    if not list(rollmill.run_dir(name).glob("config-*.json")):
        return -1
    found = rollmill.log(name).ledger.head
    return -1 if found is None else found


def descendants(process) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def find(process, module: str) -> psutil.Process | None:
    return next((child for child in that_say(process, module) if module in child.cmdline()), None)


def that_say(process, word: str) -> list[psutil.Process]:
    """What the process started whose arguments contain this."""
    found = []
    for child in descendants(process):
        with suppress(psutil.Error):
            if word in " ".join(child.cmdline()):
                found.append(child)
    return found


def interrupted(
    rollmill: Rollmill, name: str, arguments: list[str], strike: Callable[[subprocess.Popen[str]], None]
) -> str:
    """What a run says that is struck once it has version 1, and ends well."""
    process = rollmill.start(*arguments)
    try:
        wait_until(lambda: head(rollmill, name) >= 1, "version 1")
        strike(process)
        output, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, output
    return output


def kill_those_that_say(word: str) -> Callable[[subprocess.Popen[str]], None]:
    """A strike at all that the run started and whose arguments contain this."""

    def strike(process: subprocess.Popen[str]) -> None:
        victims = that_say(process, word)
        assert victims
        for victim in victims:
            victim.kill()

    return strike


def prefect_names(kind: str) -> set[str]:
    """Names of all flow or task runs that the real Prefect server has."""
    found: list[str] = []
    while True:
        asked = {"offset": len(found), "limit": 200, "sort": "ID_DESC"}
        page = httpx.post(f"{os.environ['PREFECT_API_URL']}/{kind}/filter", json=asked, trust_env=False).json()
        if not page:
            return set(found)
        found += [row["name"] for row in page]


def prefect_artifact(key: str) -> str:
    """What Prefect's UI shows under this key; empty if nothing."""
    answer = httpx.get(f"{os.environ['PREFECT_API_URL']}/artifacts/{key}/latest", trust_env=False)
    return str(answer.json()["data"]) if answer.status_code == 200 else ""


def mlflow_files(run: str) -> set[str]:
    """Artifacts of a run in MLflow."""
    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(experiments, f"tags.`rollmill.run` = '{run}'")
    return {file.path for one in found for file in client.list_artifacts(one.info.run_id)}


def mlflow_versions(name: str) -> list:
    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    return [v for v in client.search_model_versions() if name in v.name]


def test_a_run_trains_and_reports(rollmill: Rollmill):
    code, output = rollmill.train("plain")
    assert code == 0, output
    steps = audit(rollmill, "plain", 4)
    assert any(s.trained for s in steps)
    report = json.loads((rollmill.run_dir("plain") / "report.json").read_text())
    figures = {f["name"]: f["value"] for f in report["figures"]}
    assert figures["versions"] == 5 and figures["lag_max"] <= 1 and figures["trajectories"] > 0
    assert 0 <= figures["heldout_reward_before"] <= 1 and 0 <= figures["heldout_reward_after"] <= 1
    for picture in ("reward.png", "timeline.png"):
        assert (rollmill.run_dir("plain") / picture).stat().st_size > 5_000
    page = (rollmill.run_dir("plain") / "timeline.html").read_text()
    assert "trainer" in page and "generate" in page and not re.search(r"(?i)https?:|\b(src|href)=|url\(|@import", page)
    assert {"reward.png", "timeline.png", "timeline.html", "report.json"} <= mlflow_files("default/plain")
    assert "![Who was busy when](data:image/png;base64," in (shown := prefect_artifact("report-default-plain"))
    assert "timeline.html" in shown, "where to look closer"

    assert {"train plain", "rollout default/plain", "learn default/plain"} <= prefect_names("flow_runs")
    assert {"step v4", "evaluate frozen_lake v0"} <= prefect_names("task_runs")
    assert any(name.startswith("group ") for name in prefect_names("task_runs"))
    assert float(prefect_artifact("progress-default-plain")) == 100
    assert "version 4/4" in output, "the last line of the progress is the end"
    models = mlflow_versions("plain")
    assert sorted(int(v.tags["policy_version"]) for v in models) == [0, 1, 2, 3, 4]

    code, output = rollmill.train("plain")
    assert code == 2 and "--resume" in output and "Traceback" not in output

    code, output = rollmill.train("plain", "training.learning_rate=0.5", resume=True)
    assert code == 2 and "training.learning_rate" in output and "Traceback" not in output

    code, output = rollmill.train("plain", "training.steps=5", resume=True)
    assert code == 0, output
    audit(rollmill, "plain", 5)

    code, output = rollmill("versions", "list", "frozen_lake", "--set", "name=plain")
    assert code == 0 and output.count("\n") >= 6

    code, output = rollmill("evaluate", "frozen_lake", "--set", "name=plain", "--set", "evaluation.problems=8")
    assert code == 0 and "version 5" in output

    evaluate = ("evaluate", "frozen_lake", "--set", "name=plain", "--set", "evaluation.problems=8", "--version")
    assert 2 not in {e.version for e in load_all(rollmill.config("plain"), rollmill.log("plain").store)}
    code, output = rollmill(*evaluate, "2")
    assert code == 0 and "held-out frozen_lake at version 2:" in output, output
    assert 2 in {e.version for e in load_all(rollmill.config("plain"), rollmill.log("plain").store)}
    code, output = rollmill(*evaluate, "9")
    assert code == 2 and "VERSION 9" in output and "0 to 5" in output and "Traceback" not in output, output

    code, output = rollmill("evaluate", "frozen_lake", "--set", "name=mistyped")
    assert code == 2 and "mistyped" in output and "Traceback" not in output
    code, output = rollmill("evaluate", "frozen_lake", "--set", "name=mistyped")
    assert code == 2, "looking at a run that does not exist must not make one"


@pytest.mark.full
def test_lora_and_the_unit_trajectory_train_too(rollmill: Rollmill):
    code, output = rollmill.train("lora", "model.lora={rank: 4}", "rollout.unit=trajectory", "training.steps=2")
    assert code == 0, output
    audit(rollmill, "lora", 2)


@pytest.mark.full  # in every submission 20 such kills are of tests/test_crash_harness.py
@pytest.mark.parametrize("module", ["flows.rollout", "infra.training.main", "flows.learn"])
def test_a_killed_process_is_started_again_and_the_run_ends_well(rollmill: Rollmill, module: str):
    name = f"kill-{module.rsplit('.', 1)[0].replace('.', '-')}-{module.rsplit('.', 1)[1]}"

    def strike(process: subprocess.Popen[str]) -> None:
        victim = find(process, module)
        assert victim is not None
        victim.kill()

    interrupted(rollmill, name, rollmill.train_arguments(name, "training.steps=6"), strike)
    audit(rollmill, name, 6)


@pytest.mark.full
def test_the_engine_worker_killed_in_mid_run_comes_back(rollmill: Rollmill):
    name = "kill-engine"
    process = rollmill.start(*rollmill.train_arguments(name, "training.steps=6"))
    try:
        wait_until(lambda: head(rollmill, name) >= 1, "version 1")
        listening = {c.laddr.port: c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid}
        inside = {p.pid for p in descendants(process)}
        torch_users = [pid for pid in set(listening.values()) & inside if _maps_torch(pid)]
        assert len(torch_users) == 1
        os.kill(torch_users[0], signal.SIGKILL)
        output, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, output
    audit(rollmill, name, 6)


def test_after_kill_9_of_the_run_nothing_is_left_and_resume_loses_and_doubles_nothing(rollmill: Rollmill):
    name = "kill-run"
    process = rollmill.start(*rollmill.train_arguments(name, "training.steps=6"))
    wait_until(lambda: head(rollmill, name) >= 2, "version 2")
    started = descendants(process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not [p for p in started if _alive(p)], "the end of every child", 30)
    before = [r for r in rollmill.log(name).records(1) if isinstance(r, Step)]

    code, output = rollmill.train(name, "training.steps=6", resume=True)
    assert code == 0, output
    after = audit(rollmill, name, 6)
    assert [s.weights_sha256 for s in after[: len(before)]] == [s.weights_sha256 for s in before]


@pytest.mark.full
def test_a_deterministic_run_killed_at_random_ends_at_the_same_weights(rollmill: Rollmill):
    sets = ("deterministic=true", "staleness.alpha=0", "training.steps=4", "evaluation.problems=0")
    code, output = rollmill.train("undisturbed", *sets)
    assert code == 0, output
    reference = audit(rollmill, "undisturbed", 4)

    process = rollmill.start(*rollmill.train_arguments("disturbed", *sets))
    chance = random.Random(7)
    wait_until(lambda: head(rollmill, "disturbed") >= 1, "version 1")
    time.sleep(chance.uniform(0, 2))  # any moment will do: the assertion must hold for all of them
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    code, output = rollmill.train("disturbed", *sets, resume=True)
    assert code == 0, output
    disturbed = audit(rollmill, "disturbed", 4)
    assert [s.weights_sha256 for s in disturbed] == [s.weights_sha256 for s in reference]
    assert [s.trained for s in disturbed] == [s.trained for s in reference]


def test_failing_environments_are_counted_drops_and_the_run_goes_on(rollmill: Rollmill):
    code, output = rollmill.train(
        "unlucky",
        "domains.0.environment=tests.tasks.bad_environments:Unlucky",
        "domains.0.environment_options={}",
        "model.warmstart=null",
        f"model.source={{type: pretrained, path: {_warm_model(rollmill)}}}",
        "training.dynamic_sampling=false",
        "rollout.member_retries=0",
        "evaluation.problems=0",
    )
    assert code == 0, output
    audit(rollmill, "unlucky", 4)
    assert rollmill.log("unlucky").ledger.dropped_groups["environment_error"] > 0


@pytest.mark.full
def test_disturbances_on_purpose_are_never_taken_for_real_failures(rollmill: Rollmill):
    code, output = rollmill.train(
        "disturbances",
        "domains.0.injection={step_failure: 0.03, step_latency: {type: lognormal, median: 0.002}}",
        "model.warmstart=null",
        f"model.source={{type: pretrained, path: {_warm_model(rollmill)}}}",
        "rollout.member_retries=0",
        "evaluation.problems=0",
    )
    assert code == 0, output
    audit(rollmill, "disturbances", 4)
    dropped = rollmill.log("disturbances").ledger.dropped_groups
    assert dropped["injected"] > 0 and not [name for name in dropped if name.startswith("environment")]


def test_an_environment_that_always_raises_ends_the_run_by_name(rollmill: Rollmill):
    code, output = rollmill.train(
        "broken",
        "domains.0.environment=tests.tasks.bad_environments:RaisesInStep",
        "model.warmstart=null",
        f"model.source={{type: pretrained, path: {_warm_model(rollmill)}}}",
        "rollout.member_retries=0",
        "rollout.max_consecutive_failures=4",
        "evaluation.problems=0",
    )
    assert code == 2, output
    assert "max_consecutive_failures" in output and "Traceback" not in output


def _warm_model(rollmill: Rollmill) -> str:
    found = sorted((rollmill.home / "models").glob("warm-*"))
    if not found:
        code, output = rollmill.train("warm", "training.steps=1")
        assert code == 0, output
        found = sorted((rollmill.home / "models").glob("warm-*"))
    return str(found[0])


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _maps_torch(pid: int) -> bool:
    return any("libtorch" in m.path for m in psutil.Process(pid).memory_maps())
