"""The Dask workers of this machine, of machines behind SSH, and of SLURM's jobs, as `SpecCluster` starts them.

Invariants: a worker process offers slots of one hardware class; with `devices` each slot is a process that sees its own
GPUs; starting one has a deadline, wherever it is, and what was late is ended; nothing here connects to anything before
it is started.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from distributed import Nanny, Status
from distributed.deploy.ssh import Worker
from distributed.security import Security

from infra.compute.punctual import Punctual
from rl.config.infrastructure import LOOPBACK, LocalPools
from rl.config.pools import SlurmPools, SSHPools
from rl.errors import ConfigError

Workers = dict[str, dict[str, Any]]
JOB_NAME = "rollmill-engine"
"""Of SLURM's jobs."""


class LocalWorker(Punctual, Nanny):
    """Dask's own class for a process here. Dask's `death_timeout` is no such deadline: it also ends workers that lost
    their scheduler."""

    async def _late(self) -> str:
        if self.process is not None and self.process.status == Status.starting:
            self.process.status = Status.failed  # cut off in its start, it would refuse to be killed
        await self.close(reason="late")
        return (
            f"pools: worker {self.name!r} of this machine did not register within {self._start_s:g} s "
            f"(deadlines.start); if the machine is just busy, raise that, else see whether it is out of memory or "
            f"processes: `rollmill doctor`"
        )


def local_workers(pools: LocalPools, start_s: float, host: str = LOOPBACK, security: Security | None = None) -> Workers:
    """One process per hardware class: a class is a kind of machine, and its stages share that process. Slots that see
    GPUs of their own are a process each."""
    found = {}
    for name, amount in pools.slots.items():
        for at, seen in enumerate(pools.devices.get(name, ())):  # type: ignore[call-overload]
            found[f"{name}-{at}"] = _nanny(name, 1, start_s, host, security, _visible(seen))
        if amount and name not in pools.devices:
            found[name] = _nanny(name, amount, start_s, host, security, {})
    return found


def _nanny(
    name: str, amount: int, start_s: float, host: str, security: Security | None, visible: dict[str, str]
) -> dict[str, Any]:
    options = {
        "start_s": start_s,
        "host": host,
        "nthreads": amount,
        "resources": {name: amount},
        "memory_limit": 0,
        "dashboard": False,
        # A failed stage is told by name where it is watched; Dask would print its traceback here as well.
        "silence_logs": logging.CRITICAL,
        "env": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **visible},
    }
    secure = {} if security is None else {"security": security, "protocol": "tls"}
    return {"cls": LocalWorker, "options": options | secure}


def _visible(seen: Sequence[int]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, seen))}


def ssh_options(pools: SSHPools) -> dict[str, Any]:
    """How `asyncssh.connect` reaches the machines. An unknown machine is refused."""
    chosen = {"username": pools.user, "known_hosts": pools.known_hosts}
    found: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    keys = {} if pools.key_file is None else {"client_keys": [pools.key_file]}
    return {"port": pools.port} | found | keys


class MachineWorker(Punctual, Worker):
    """Dask's own class for SSH."""

    async def _late(self) -> str:
        return (
            f"pools.machines: {self.remote_python} started no worker on {self.address} within {self._start_s:g} s "
            "(deadlines.start)"
        )


def ssh_workers(pools: SSHPools, start_s: float) -> Workers:
    """One process for each engine; it inherits this process's Dask configuration, and so finds the certificate where
    `infra.compute.certificate` put it."""
    try:
        import asyncssh  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("pools.type ssh needs a library; run `pip install 'rollmill[ssh]'`") from error

    found = {}
    for machine in pools.machines:
        for at in range(machine.bandwidth_gpu):
            options = {
                "host": machine.host,
                "nthreads": 1,
                "resources": {"bandwidth_gpu": 1},
                "memory_limit": 0,
                "protocol": "tls",
                "env": {"OMP_NUM_THREADS": "1", **(_visible(machine.devices[at]) if machine.devices else {})},
            }
            found[f"{machine.host}-{at}"] = {
                "cls": MachineWorker,
                "options": {
                    "address": machine.host,
                    "connect_options": ssh_options(pools),
                    "kwargs": options,
                    "remote_python": pools.python or sys.executable,
                    "start_s": start_s,
                },
            }
    return found


def slurm_workers(pools: SlurmPools, security: Security, start_s: float) -> Workers:
    """One job for each engine."""
    try:
        from infra.compute.slurm import EngineJob
    except ModuleNotFoundError as error:
        raise ConfigError("pools.type slurm needs a library; run `pip install 'rollmill[slurm]'`") from error
    directives = [f"--gpus={pools.gpus}"] * bool(pools.gpus) + list(pools.directives)
    options = {
        "queue": pools.partition,
        "account": pools.account,
        "walltime": pools.walltime,
        "cores": pools.cores,
        "processes": 1,
        "memory": f"{pools.memory_gb}GB",
        "job_extra_directives": directives,
        "job_script_prologue": ["export OMP_NUM_THREADS=1", *pools.prologue],
        "worker_extra_args": ["--resources", "bandwidth_gpu=1"],
        "python": pools.python or sys.executable,
        "job_name": JOB_NAME,
        "protocol": "tls://",
        "security": security,
        "log_directory": f"{pools.shared}/logs",
        "start_s": start_s,
    }
    return {f"slurm-{at}": {"cls": EngineJob, "options": options} for at in range(pools.jobs)}
