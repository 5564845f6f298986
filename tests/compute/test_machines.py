"""Pools beyond one process: GPUs to slots, a certificate of the cluster's own, jobs of SLURM, pods of Kubernetes."""

from __future__ import annotations

import base64
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from infra.compute.certificate import certificate
from infra.compute.kubernetes import MOUNT, KubernetesRefused, engine_pods
from infra.compute.pools import cluster, connect, slots
from infra.compute.workers import local_workers, slurm_workers
from infra.proxy.listen import Server as HttpServer
from infra.proxy.listen import bind, listen
from rl.config.infrastructure import LocalPools
from rl.config.load import validate
from rl.config.pools import Here, KubernetesPools, SlurmPools, SSHMachine, SSHPools
from rl.errors import ConfigError
from rl.placement import HardwareClass

SMALL = Here(compute_gpu=1, cpu=2, **{"lambda": 1})


def test_slots_with_devices_are_a_process_each() -> None:
    pools = LocalPools(compute_gpu=1, bandwidth_gpu=2, devices={"compute_gpu": [[0, 1]], "bandwidth_gpu": [[2], [3]]})
    workers = local_workers(pools, 60)
    assert sorted(workers) == ["bandwidth_gpu-0", "bandwidth_gpu-1", "compute_gpu-0", "cpu", "lambda"]
    assert workers["compute_gpu-0"]["options"]["env"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert workers["bandwidth_gpu-1"]["options"]["resources"] == {"bandwidth_gpu": 1}
    assert "CUDA_VISIBLE_DEVICES" not in workers["cpu"]["options"]["env"]


@pytest.mark.parametrize(
    "pools, words",
    [
        ({"type": "local", "devices": {"bandwidth_gpu": [[0], [1]]}}, ["devices.bandwidth_gpu", "2 slots", "is 1"]),
        ({"type": "ssh", "host": "head", "machines": [{"host": "a;b"}]}, ["pools.machines.0.host"]),
        ({"type": "slurm", "host": "head", "jobs": 1, "shared": "/s", "walltime": "1 day"}, ["pools.walltime"]),
        ({"type": "ssh", "host": "head", "machines": [{"host": "gpu1"}]}, ["engine.instances", "pools.host (head)"]),
    ],
)
def test_a_mistake_is_named(pools: dict, words: list[str]) -> None:
    tree = {
        "name": "r",
        "domains": [{"name": "lake", "environment": "frozen_lake"}],
        "model": {"warmstart": {}},
        "pools": pools,
    }
    with pytest.raises(ConfigError) as error:
        validate(tree, "run.yaml")
    assert all(word in str(error.value) for word in words), error.value


def test_the_slots_of_all_machines_are_counted() -> None:
    machines = (SSHMachine(host="gpu1", bandwidth_gpu=2), SSHMachine(host="gpu2"))
    assert SSHPools(host="10.0.0.1", here=SMALL, machines=machines).slots["bandwidth_gpu"] == 3
    assert SlurmPools(host="head", here=Here(bandwidth_gpu=1), jobs=4, shared="/s").slots["bandwidth_gpu"] == 5


def test_a_job_of_slurm_starts_a_tagged_worker_with_the_certificate(tmp_path: Path) -> None:
    pools = SlurmPools(
        host="head",
        jobs=2,
        shared=str(tmp_path / "shared"),
        partition="gpus",
        account="team",
        walltime="2:00:00",
        gpus=1,
        directives=("--constraint=h200",),
        prologue=("source /opt/rollmill/bin/activate",),
        python="/opt/rollmill/bin/python",
    )
    with certificate(Path(pools.shared)) as made:
        workers = slurm_workers(pools, made.security, 60)
        assert sorted(workers) == ["slurm-0", "slurm-1"]
        spec = workers["slurm-0"]
        script = spec["cls"](scheduler="tls://head:8786", name="slurm-0", **spec["options"]).job_script()
        key = str(made.directory / "key.pem")
    lines = script.splitlines()
    for line in ("-p gpus", "-A team", "-t 2:00:00", "--gpus=1", "--constraint=h200", "--cpus-per-task=8", "--mem=60G"):
        assert f"#SBATCH {line}" in lines, script
    (command,) = (line for line in lines if "distributed.cli.dask_worker" in line)
    for word in ("/opt/rollmill/bin/python", "tls://head:8786", "--resources bandwidth_gpu=1", f"--tls-key {key}"):
        assert word in command, command
    assert lines.index("source /opt/rollmill/bin/activate") < lines.index(command)
    assert not Path(key).exists()


def test_a_certificate_is_the_users_alone_and_gone_afterwards(tmp_path: Path) -> None:
    with certificate(tmp_path) as made:
        assert stat.S_IMODE(made.directory.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in made.directory.iterdir()} == {0o600}
        assert os.environ["DASK_DISTRIBUTED__COMM__TLS__CA_FILE"] == str(made.directory / "ca.pem")
    assert not made.directory.exists() and "DASK_DISTRIBUTED__COMM__TLS__CA_FILE" not in os.environ


def kubeconfig(server: str) -> str:
    named = {"name": "here", "cluster": {"server": server}, "user": {}, "context": {"cluster": "here", "user": "here"}}
    kinds = {f"{kind}s": [{"name": "here", kind: named[kind]}] for kind in ("cluster", "user", "context")}
    return yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "current-context": "here", **kinds})


class Cluster:
    """A stand-in for the API of Kubernetes: a secret is files, a job runs its pods' command as processes here."""

    def __init__(self, directory: Path):
        self.directory, self.deleted = directory, threading.Event()
        self.job: dict = {}
        self.secret: dict = {}
        self.pods: list[subprocess.Popen] = []
        routes = [
            Route("/version/", lambda _: JSONResponse({"major": "1", "minor": "31", "gitVersion": "v1.31.0"})),
            Route("/apis/batch/v1/namespaces/training/jobs", self.create_job, methods=["POST"]),
            Route("/api/v1/namespaces/training/secrets", self.create_secret, methods=["POST"]),
            Route("/apis/batch/v1/namespaces/training/jobs/{name}", self.delete_job, methods=["DELETE"]),
        ]
        self.listener = bind("127.0.0.1", 0)
        self.server = HttpServer(Starlette(routes=routes))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True)
        listen(self.listener)
        self.thread.start()
        where = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        (directory / "kubeconfig").write_text(kubeconfig(where))

    async def create_job(self, request: Request) -> JSONResponse:
        self.job = await request.json()
        kubernetes_validate.validate(self.job, "1.31", strict=True)
        self.job["metadata"]["uid"] = "a-uid"
        return JSONResponse(self.job, 201)

    async def create_secret(self, request: Request) -> JSONResponse:
        self.secret = await request.json()
        kubernetes_validate.validate(self.secret, "1.31", strict=True)
        for name, text in self.secret["data"].items():
            (self.directory / name).write_bytes(base64.b64decode(text))
        spec = self.job["spec"]["template"]["spec"]["containers"][0]
        variables = {entry["name"]: entry["value"].replace(str(MOUNT), str(self.directory)) for entry in spec["env"]}
        command = [sys.executable, "-m", "distributed.cli.dask_worker", *spec["command"][2:]]
        for _ in range(self.job["spec"]["parallelism"]):
            self.pods.append(subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True))
        return JSONResponse(self.secret, 201)

    async def delete_job(self, request: Request) -> JSONResponse:
        for pod in self.pods:
            os.killpg(pod.pid, 15)
        self.deleted.set()
        return JSONResponse(self.job)

    def stop(self) -> None:
        for pod in self.pods:
            if pod.poll() is None:
                os.killpg(pod.pid, 9)
            pod.wait(10)
        self.server.should_exit = True
        self.thread.join(10)


@pytest.mark.full
@pytest.mark.slow
def test_pods_of_kubernetes_join_over_tls_and_end_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubernetes = Cluster(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    pools = KubernetesPools(host="127.0.0.1", here=SMALL, pods=2, image="rollmill:cuda", namespace="training")
    try:
        with cluster(pools, 60) as address, connect(address, 60) as client:
            client.wait_for_workers(5, timeout=90)
            assert slots(client)[HardwareClass.BANDWIDTH_GPU] == 2
            assert kubernetes.secret["metadata"]["ownerReferences"][0]["uid"] == "a-uid"
            assert not kubernetes.deleted.is_set()
        assert kubernetes.deleted.is_set()
    finally:
        kubernetes.stop()


def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kubeconfig").write_text(kubeconfig("http://127.0.0.1:9"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    pools = KubernetesPools(host="127.0.0.1", pods=1, image="x", namespace="training")
    with certificate(tmp_path) as made, pytest.raises(KubernetesRefused, match="namespace 'training'"):
        engine_pods(pools, made, "tls://127.0.0.1:1").__enter__()
