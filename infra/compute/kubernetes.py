"""Engines as pods of a Kubernetes job, which join the run's own scheduler.

    secret  the cluster's certificate; owned by the job, and so gone with it
    job     a pod for each engine, started again where one fails; ends when the scheduler is gone, and is then removed

Invariants: the pods run as nobody special, with no right in the cluster; the store's credentials are a secret that is
there already, named in the configuration.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from infra.compute.certificate import FILES, Certificate
from rl.config.pools import KubernetesPools
from rl.errors import ConfigError, RollmillError

MOUNT = Path("/etc/rollmill-tls")
GONE_S = 300
"""After its end, and before it is removed."""
ALONE_S = 120
"""Without a scheduler a pod ends."""


class KubernetesRefused(RollmillError):
    """The API server of `pools.type: kubernetes` does not answer, or does not allow what is asked."""


def job(pools: KubernetesPools, name: str, address: str) -> dict[str, Any]:
    """The job whose pods join the scheduler at `address`."""
    settings = Certificate(MOUNT).settings
    variables = {f"DASK_{key.upper().replace('.', '__').replace('-', '_')}": value for key, value in settings.items()}
    variables |= {"OMP_NUM_THREADS": "1", "ROLLMILL_HOME": "/tmp/rollmill"}
    gpus = {"nvidia.com/gpu": str(pools.gpus)} if pools.gpus else {}
    worker = ["dask", "worker", address, "--no-dashboard", "--nthreads", "1", "--memory-limit", "0"]
    container = {
        "name": "engine",
        "image": pools.image,
        "command": [*worker, "--resources", "bandwidth_gpu=1", "--death-timeout", str(ALONE_S)],
        "env": [{"name": key, "value": value} for key, value in sorted(variables.items())],
        "envFrom": [{"secretRef": {"name": pools.secret}}],
        "resources": {
            "requests": {"cpu": str(pools.cores), "memory": f"{pools.memory_gb}Gi"},
            "limits": {"memory": f"{pools.memory_gb}Gi", **gpus},
        },
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "tls", "mountPath": str(MOUNT), "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": False,
        "nodeSelector": dict(pools.node_selector),
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": 10001, "fsGroup": 10001, "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "tls", "secret": {"secretName": name, "defaultMode": 0o440}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
        ],
    }  # fmt: skip
    labels = {"app": "rollmill-engine", "rollmill": name}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": pools.namespace, "labels": labels},
        "spec": {
            "parallelism": pools.pods,
            "completions": pools.pods,
            "backoffLimit": 6 * pools.pods,
            "ttlSecondsAfterFinished": GONE_S,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def secret(pools: KubernetesPools, name: str, made: Certificate, owner: str) -> dict[str, Any]:
    """The certificate, owned by the job with the uid `owner`."""
    data = {file: base64.b64encode((made.directory / file).read_bytes()).decode() for file in FILES}
    owned = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": owner}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": pools.namespace, "ownerReferences": [owned]},
        "data": data,
    }


@contextmanager
def engine_pods(pools: KubernetesPools, made: Certificate, address: str) -> Iterator[None]:
    """Pods that join the scheduler, for the duration. Raises ConfigError without the library, KubernetesRefused."""
    try:
        import kr8s
        from kr8s.objects import Job, Secret
    except ModuleNotFoundError as error:
        raise ConfigError("pools.type kubernetes needs a library; run `pip install 'rollmill[kubernetes]'`") from error
    name = f"rollmill-{uuid.uuid4().hex[:12]}"
    try:
        started = Job(job(pools, name, address))
        started.create()
    except (kr8s.ServerError, kr8s.APITimeoutError, httpx.HTTPError, OSError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise KubernetesRefused(
            f"pools: no engines can be started in namespace {pools.namespace!r}: {type(error).__name__}: {first}; try "
            f"`kubectl --namespace {pools.namespace} get jobs` from here"
        ) from error
    try:
        Secret(secret(pools, name, made, started.raw["metadata"]["uid"])).create()
        yield
    finally:
        started.delete(propagation_policy="Background")
