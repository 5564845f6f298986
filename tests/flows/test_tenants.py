"""A service with real processes: tenants come and go, and what one of them does wrong hurts that one alone."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.tenant_service import Tenants, load_service
from flows.tenants import find_service
from infra.services.endpoints import Endpoints
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.ledger import Ledger
from rl.records import Step
from rl.trajectory import Uid
from tests.command_line import Rollmill
from tests.flows.tenant_commands import Commands, check_credentials, check_looking, check_orders, check_report
from tests.flows.test_runs import find, mlflow_files, prefect_artifact, that_say, wait_until

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

SETS = ("foreign_code=true", "engine.max_batch=32", "pools={type: local, compute_gpu: 2, cpu: 64, lambda: 8}",
        "deadlines.environment_step=1", "deadlines.trajectory=20", "trainers=2", "resident=2")  # fmt: skip
TRAINING = {"groups_per_step": 2, "group_size": 4, "learning_rate": 1e-3, "micro_batch_size": 64}
ROLLOUT = {"max_new_tokens": 8, "max_tokens": 384, "member_retries": 0, "max_consecutive_failures": 3}


def job(tenant: str, steps: int = 3, **changes: Any) -> dict[str, Any]:
    training = TRAINING | {"steps": steps}
    return {"tenant": tenant, "name": "lake", "domains": ["frozen_lake"], "training": training, "rollout": ROLLOUT,
            "lora": {"rank": 4}} | changes  # fmt: skip


def own(**domain: Any) -> list[dict[str, Any]]:
    return [{"name": "own", "environment": "frozen_lake", "max_turns": 4} | domain]


def sets_of(name: str, *more: str) -> list[str]:
    """Later ones in the place of earlier ones of the same field, or of its section."""
    roots = {one.partition("=")[0] for one in more}
    kept = [one for one in SETS if one.partition("=")[0].partition(".")[0] not in roots]
    return [f"name={name}", *kept, *more]


@contextmanager
def serving(
    rollmill: Rollmill, name: str, *more: str, start_s: float = 300
) -> Iterator[tuple[Tenants, subprocess.Popen[str], Path]]:
    """The service in a process of its own, up; what it says goes to the file."""
    values = sets_of(name, *more)
    sets = [part for value in values for part in ("--set", value)]
    said = rollmill.home / f"{name}-{time.monotonic_ns()}.out"
    with said.open("w") as output:
        process = subprocess.Popen(
            rollmill.command("tenants", "serve", "lake", *sets), env=rollmill.env, stdout=output,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
    try:
        wait_until(lambda: "is up" in said.read_text() or process.poll() is not None, "the service", start_s)
        assert process.poll() is None, said.read_text()
        service = load_service("lake", values)
        yield Tenants(find_service(ObjectStore.connect(service.store), name)), process, said
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def steps_of(store: ObjectStore, id: str) -> list[Step]:
    """Fold the whole log of a job anew and check what must hold; its steps."""
    records = list(CommitLog(store, f"{id}/", "test").records(1))
    ledger, trained = Ledger(), set()
    for record in records:
        ledger.apply(record)
        if isinstance(record, Step):
            uids = set(map(Uid.parse, record.trained))
            assert not uids & trained
            trained |= uids
    return [record for record in records if isinstance(record, Step)]


def base_of(store: ObjectStore, name: str) -> str:
    return hashlib.sha256(b"".join(store.get(key) for key in sorted(store.keys(f"services/{name}/base/")))).hexdigest()


def test_two_tenants_train_side_by_side_and_the_one_whose_reward_raises_fails_alone(
    rollmill: Rollmill, services: Endpoints, tmp_path: Path
):
    name = "duo"
    commands = Commands(rollmill, name)
    with serving(rollmill, name, "trainers=1") as (tenants, process, said):
        store = ObjectStore.connect(tenants.service.store)
        base = base_of(store, name)
        children = psutil.Process(process.pid).children(recursive=True)
        tenants.submit(job("ann", steps=2))
        tenants.submit(job("bob", steps=2, domains=own(reward="tests.flows.tenants_code:raises")))
        tenants.submit(job("cyd", steps=2, lora={"rank": 2}))
        check_looking(commands, {"ann/lake", "bob/lake", "cyd/lake"})
        assert "reward_error" in (tenants.wait("bob/lake", 200).failure or "")
        for tenant in ("ann", "cyd"):
            assert tenants.wait(f"{tenant}/lake", 200).state == "done", said.read_text()
            steps = steps_of(store, f"{tenant}/lake")
            assert [s.version for s in steps] == [0, 1, 2] and len({s.weights_sha256 for s in steps}) == 3
        assert base_of(store, name) == base, "nobody changes the base"
        rows = {row.job: row for row in tenants.figures()}
        assert all(rows[f"{t}/lake"].time_to_first_step for t in ("ann", "cyd")), rows
        assert sum(row.cost_share or 0 for row in rows.values()) == pytest.approx(1)
        for tenant in ("ann", "cyd"):
            wait_until(lambda t=tenant: store.exists(f"{t}/lake/report/report.json"), f"the report of {tenant}")
            told = json.loads(store.get(f"{tenant}/lake/report/report.json"))["figures"]
            told = {figure["name"]: figure["value"] for figure in told}
            assert told["versions"] == 3 and 0 <= told["trainer_idle"] <= 1, told
            assert store.get(f"{tenant}/lake/report/reward.png").startswith(b"\x89PNG")
        assert not list(store.keys("bob/lake/report/")), "it learned nothing"
        wait_until(lambda: {"reward.png", "timeline.png"} <= mlflow_files("ann/lake"), "the pictures in MLflow")
        wait_until(lambda: prefect_artifact("report-ann-lake"), "the report in Prefect")
        check_report(commands, "ann/lake", tmp_path / "report")
        check_credentials(commands, services.data_dir, store, "ann", "cyd")
        deleted = check_orders(commands, job("dan", steps=40), tmp_path / "dan.yaml")
        wait_until(lambda: tenants.job(deleted).state == "deleted", "the deletion", 120)
        assert all(key.startswith(f"{deleted}/log/") for key in store.keys(f"{deleted}/"))
    assert process.returncode in (0, 130), said.read_text()
    assert not psutil.wait_procs(children, timeout=60)[1]


@pytest.mark.full
def test_tenants_come_and_go_and_one_that_does_wrong_hurts_itself_alone(rollmill: Rollmill, tmp_path: Path):
    name = "shop"
    with serving(rollmill, name) as (tenants, process, said):
        store = ObjectStore.connect(tenants.service.store)
        base = base_of(store, name)
        children = psutil.Process(process.pid).children(recursive=True)
        file = tmp_path / "eve.yaml"
        file.write_text(json.dumps(job("eve", lora={"rank": 0})))
        code, output = rollmill("tenants", "submit", "lake", str(file), "--set", f"name={name}")
        assert code == 2 and "lora.rank" in output and "(found 0)" in output and "Traceback" not in output
        wrong = {
            "bob": job("bob", domains=own(reward="tests.flows.tenants_code:raises")),
            "cyd": job("cyd", domains=own(environment="tests.tasks.bad_environments:HangsInStep")),
            "dan": job("dan", steps=50, budget=100),
        }
        for one in (job("ann"), *wrong.values(), job("fay", steps=40), job("gus", steps=40), job("hal", steps=40)):
            tenants.submit(one)
        assert "RewardFailure" in (why := tenants.wait("bob/lake", 240).failure or "") or "reward_error" in why, why
        assert "environment_timeout" in (tenants.wait("cyd/lake", 240).failure or "")
        assert "BudgetSpent: it has generated" in (tenants.wait("dan/lake", 240).failure or "")
        assert tenants.wait("ann/lake", 240).state == "done", said.read_text()

        wait_until(lambda: len(steps_of(store, "fay/lake")) > 2, "fay's first steps")
        assert tenants.order("fay/lake", "pause").state == "paused"
        assert tenants.order("gus/lake", "cancel").state == "cancelled"
        wait_until(lambda: "fay/lake paused" in said.read_text(), "the pause")
        settled = quiet(lambda: len(steps_of(store, "fay/lake")))
        assert tenants.order("fay/lake", "resume").state == "waiting"
        wait_until(lambda: len(steps_of(store, "fay/lake")) > settled, "fay going on")
        assert tenants.order("bob/lake", "delete").state == "deleting"
        wait_until(lambda: tenants.job("bob/lake").state == "deleted", "the deletion")
        assert all(key.startswith("bob/lake/log/") for key in store.keys("bob/lake/"))
        tenants.order("fay/lake", "cancel")
        tenants.order("hal/lake", "cancel")

        steps = steps_of(store, "ann/lake")
        assert [s.version for s in steps] == [0, 1, 2, 3] and all(s.alpha == 0 for s in steps)
        assert len({s.weights_sha256 for s in steps}) == 4, "every step changed the adapter"
        assert base_of(store, name) == base, "nobody changes the base"
        code, output = rollmill("tenants", "list", "lake", "--json", "--set", f"name={name}")
        assert code == 0, output
        rows = {row["job"]: row for row in json.loads(output[output.index("[") :])}
        assert rows["ann/lake"]["time_to_first_step"] > 0 and rows["ann/lake"]["tokens"] > 0
        assert rows["ann/lake"]["logprob_gap"] < 1e-3 and "bob/lake" not in rows
        assert sum(row["cost_share"] for row in rows.values()) == pytest.approx(1)

        config = tmp_path / "ann.yaml"
        code, output = rollmill("tenants", "config", "lake", "ann/lake", "--to", str(config), "--set", f"name={name}")
        assert code == 0, output
        code, output = rollmill("audit", str(config))
        assert code == 0, output
    assert process.returncode in (0, 130)
    gone = psutil.wait_procs(children, timeout=60)
    assert not gone[1], gone[1]


def quiet(count: Callable[[], int], seconds: float = 4.0, deadline_s: float = 60.0) -> int:
    """The count, once it has not changed for so long."""
    end, known, since = time.monotonic() + deadline_s, count(), time.monotonic()
    while time.monotonic() - since < seconds:
        assert time.monotonic() < end, f"it goes on to change: {known}"
        time.sleep(0.2)
        if (now := count()) != known:
            known, since = now, time.monotonic()
    return known


@pytest.mark.full
def test_a_service_whose_processes_are_killed_goes_on_from_the_store(rollmill: Rollmill):
    name = "kills"
    with serving(rollmill, name) as (tenants, process, said):
        for tenant in ("kim", "lou", "max"):
            tenants.submit(job(tenant, steps=12))
        store = ObjectStore.connect(tenants.service.store)
        for module in ("flows.tenant_rollout", "infra.training.tenants"):
            wait_until(lambda: all(len(steps_of(store, f"{t}/lake")) > 1 for t in ("kim", "lou")), "steps")
            victim = find(process, module)
            assert victim is not None, said.read_text()
            victim.kill()
            wait_until(lambda m=module, v=victim: (now := find(process, m)) is not None and now.pid != v.pid, module)
        process.kill()
        process.wait(30)
    with serving(rollmill, name) as (tenants, process, said):
        for tenant in ("kim", "lou", "max"):
            assert tenants.wait(f"{tenant}/lake", 300).state == "done", said.read_text()
            assert [s.version for s in steps_of(store, f"{tenant}/lake")] == list(range(13))


FLEET = "pools={type: local, compute_gpu: 2, bandwidth_gpu: 2, cpu: 64, lambda: 8}"


@pytest.mark.full
def test_a_service_on_a_fleet_outlives_an_engine(rollmill: Rollmill):
    name = "tenants-fleet"
    instances = "engine.instances={compute_gpu: 1, bandwidth_gpu: 1}"
    with serving(rollmill, name, FLEET, instances, "trainers=1", "restarts.engine=1") as (tenants, process, said):
        store = ObjectStore.connect(tenants.service.store)
        base = base_of(store, name)
        tenants.submit(job("nia", steps=8))
        tenants.submit(job("oto", steps=8, domains=own(runs_on="compute_gpu")))
        wait_until(lambda: all(len(steps_of(store, f"{t}/lake")) > 1 for t in ("nia", "oto")), "first steps")
        hosts = that_say(process, "infra.engines.process")
        assert len(hosts) == 2 and find(process, "infra.proxy.main") is not None
        hosts[0].kill()
        for tenant in ("nia", "oto"):
            assert tenants.wait(f"{tenant}/lake", 300).state == "done", said.read_text()
            assert [s.version for s in steps_of(store, f"{tenant}/lake")] == list(range(9))
        for row in tenants.figures():
            assert row.logprob_gap is not None and row.logprob_gap < 1e-3, "each has its own adapter on every engine"
        assert base_of(store, name) == base
        assert tenants.utilisation()["engines"] > 0


@pytest.mark.full
@pytest.mark.timeout(1600)
def test_a_service_on_vllm(rollmill: Rollmill):
    name = "tenants-vllm"
    engine = "engine={type: vllm, instances: {bandwidth_gpu: 1}, max_batch: 16, max_adapters: 4}"
    patient = "deadlines.trajectory=300"  # a vLLM on the CPU of a busy machine
    with serving(rollmill, name, FLEET, engine, "running=4", "trainers=1", patient, start_s=900) as (tenants, _, said):
        store = ObjectStore.connect(tenants.service.store)
        for n, rank in enumerate((2, 4, 8)):
            tenants.submit(job(f"v{n}", steps=2, lora={"rank": rank}))
        for n in range(3):
            assert tenants.wait(f"v{n}/lake", 600).state == "done", said.read_text()
            assert [s.version for s in steps_of(store, f"v{n}/lake")] == [0, 1, 2]
        for row in tenants.figures():
            assert row.logprob_gap is not None and row.logprob_gap < 1e-3, row
