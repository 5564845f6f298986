"""Pools beyond one process: GPUs to slots, a certificate of the cluster's own, machines behind SSH, jobs of SLURM."""

from __future__ import annotations

import asyncio
import base64
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import kubernetes_validate
import pytest
import yaml
from distributed import Client
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from infra.compute.certificate import MachineUnreachable, certificate
from infra.compute.kubernetes import MOUNT, KubernetesRefused, engine_pods
from infra.compute.pools import cluster, connect, slots
from infra.compute.workers import local_workers, slurm_workers
from infra.proxy.listen import Server as HttpServer
from infra.proxy.listen import bind, listen
from rl.config.infrastructure import LocalPools
from rl.config.load import validate
from rl.config.pools import Here, KubernetesPools, SlurmPools, SSHMachine, SSHPools
from rl.errors import ConfigError, DeadlineExceeded
from rl.placement import HardwareClass

SMALL = Here(compute_gpu=1, cpu=2, **{"lambda": 1})


def visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_slots_with_devices_are_a_process_each() -> None:
    pools = LocalPools(compute_gpu=1, bandwidth_gpu=2, devices={"compute_gpu": [[0, 1]], "bandwidth_gpu": [[2], [3]]})
    workers = local_workers(pools)
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
        workers = slurm_workers(pools, made.security)
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


class Server:
    """An SSH server of this machine, in a thread: it runs what it is told, as sshd does."""

    def __init__(self, directory: Path):
        self.key = asyncssh.generate_private_key("ssh-ed25519")
        self.user = asyncssh.generate_private_key("ssh-ed25519")
        self.user.write_private_key(directory / "id")
        self.user.write_public_key(directory / "id.pub")
        self.commands: list[str] = []
        self.directory, self.loop = directory, asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.port = self._call(self._start())
        known = f"[127.0.0.1]:{self.port} {self.key.export_public_key().decode()}"
        (directory / "known_hosts").write_text(known)

    def _call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    async def _start(self) -> int:
        self.server = await asyncssh.listen(
            "127.0.0.1",
            0,
            server_host_keys=[self.key],
            authorized_client_keys=str(self.directory / "id.pub"),
            process_factory=self._run,
            sftp_factory=True,
            encoding=None,
        )
        return self.server.get_port()

    async def _run(self, process: asyncssh.SSHServerProcess) -> None:
        self.commands.append(process.command or "")
        child = await asyncio.create_subprocess_shell(
            process.command or "true", stdin=-1, stdout=-1, stderr=-1, start_new_session=True
        )
        await process.redirect(stdin=child.stdin, stdout=child.stdout, stderr=child.stderr)
        closed = asyncio.create_task(process.channel.wait_closed())
        ended = asyncio.create_task(child.wait())
        await asyncio.wait({closed, ended}, return_when=asyncio.FIRST_COMPLETED)
        if child.returncode is None:
            os.killpg(child.pid, 15)
            await child.wait()
        process.exit(child.returncode or 0)

    def stop(self) -> None:
        async def close() -> None:
            self.server.close()
            await self.server.wait_closed()

        self._call(close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    try:
        yield made
    finally:
        made.stop()


def pools_of(server: Server, **more) -> SSHPools:
    return SSHPools(
        host="127.0.0.1",
        here=SMALL,
        machines=(SSHMachine(host="127.0.0.1", bandwidth_gpu=1, devices=((5,),)),),
        port=server.port,
        key_file=str(server.directory / "id"),
        known_hosts=str(server.directory / "known_hosts"),
        **more,
    )


@pytest.mark.slow
def test_engines_of_a_machine_behind_ssh_join_over_tls(server: Server) -> None:
    with cluster(pools_of(server), 60) as address:
        assert address.startswith("tls://")
        with connect(address, 60) as client:
            client.wait_for_workers(4, timeout=60)
            assert slots(client) == {
                HardwareClass.COMPUTE_GPU: 1, HardwareClass.BANDWIDTH_GPU: 1, HardwareClass.CPU: 2,
                HardwareClass.LAMBDA: 1,
            }  # fmt: skip
            assert client.submit(visible, resources={"bandwidth_gpu": 1}, pure=False).result(timeout=60) == "5"
        (started,) = (command for command in server.commands if "dask_spec" in command)
        assert sys.executable in started and "PRIVATE KEY" not in started
        with pytest.raises((DeadlineExceeded, OSError, TypeError, ValueError)):
            Client(address.replace("tls", "tcp"), timeout=3, set_as_default=False)
    assert not list(Path("/tmp").glob("rollmill-*/key.pem"))


@pytest.mark.slow
def test_a_machine_that_is_not_known_is_refused_by_name(server: Server, tmp_path: Path) -> None:
    (tmp_path / "known_hosts").write_text("")
    with pytest.raises(MachineUnreachable, match="can not be used by SSH"), cluster(pools_of(server), 60):
        pass


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
