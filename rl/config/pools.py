"""Machines beside this one: GPUs for engines, reached by SSH, or given by SLURM or Kubernetes.

Invariants: environments, rewards, the trainer and the proxy run on this machine (`here`), which the others reach at
`host`; the others carry engines of the class bandwidth_gpu and nothing else. What travels between them is encrypted
(Dask) or asks for a key of the run's own (engines and proxy); secrets of the store are the environment's, everywhere.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rl.config.base import Name, Section
from rl.config.infrastructure import LocalPools, SchedulerPools

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9@._:/=,+-]+$")]
"""Without what a shell would read."""


class Here(LocalPools):
    """This machine's own slots."""

    bandwidth_gpu: Annotated[int, Field(ge=0)] = 0
    """Engines here, beside those elsewhere."""


class _Beyond(Section):
    """This machine and others."""

    host: Word
    """Address of this machine, at which the others reach the Dask scheduler and the proxy. A private network's."""
    here: Here = Here()
    """Slots of this machine."""

    elsewhere: ClassVar[str]
    """Where a user wrote how many engines are elsewhere."""

    @property
    def engines(self) -> int:
        """Engines elsewhere."""
        raise NotImplementedError

    def field(self, name: str) -> str:
        """Where a user wrote the slots of a class."""
        return f"pools.here.{name}" + f" + pools.{self.elsewhere}" * (name == "bandwidth_gpu")

    @property
    def slots(self) -> dict[str, int]:
        """By hardware class, of all machines."""
        mine = self.here.slots
        return mine | {"bandwidth_gpu": mine["bandwidth_gpu"] + self.engines}


class SSHMachine(Section):
    """A machine with GPUs for engines."""

    host: Word
    """Its address."""
    bandwidth_gpu: Annotated[int, Field(ge=1)] = 1
    """Engines there."""
    devices: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...] = ()
    """GPUs that each of them sees, as nvidia-smi counts them: [[0], [1]]. Left away, each sees all of them."""

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        if self.devices and len(self.devices) != self.bandwidth_gpu:
            raise ValueError(
                f"devices names the GPUs of {len(self.devices)} engines, but bandwidth_gpu is {self.bandwidth_gpu}; "
                f"give one list for each"
            )
        return self


class SSHPools(_Beyond):
    """Engines on machines that are reached by SSH, with the keys of the user's agent or of `key_file`. The same
    Rollmill is installed there, and the environment has the store's credentials (extra `ssh`)."""

    elsewhere = "machines.*.bandwidth_gpu"
    type: Literal["ssh"] = "ssh"
    machines: Annotated[tuple[SSHMachine, ...], Field(min_length=1)]
    """The machines."""
    user: Word | None = None
    """None is the one of this machine."""
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    """Of SSH."""
    key_file: str | None = None
    """Private key; None asks the agent, then ~/.ssh."""
    known_hosts: str | None = None
    """File with the machines' keys; None is ~/.ssh/known_hosts. A machine that is not in it is refused."""
    python: Word | None = None
    """Interpreter there that has Rollmill; None is the path of this one."""

    @property
    def engines(self) -> int:
        return sum(machine.bandwidth_gpu for machine in self.machines)


class SlurmPools(_Beyond):
    """Engines as jobs of SLURM, submitted from this machine, which shares a file system with the nodes (extra
    `slurm`)."""

    elsewhere = "jobs"
    type: Literal["slurm"] = "slurm"
    jobs: Annotated[int, Field(ge=1)]
    """Engines, a job each."""
    shared: str
    """A directory that this machine and the nodes see; the cluster's certificate lies there while it runs."""
    partition: Word | None = None
    """Of SLURM; None is the default one."""
    account: Word | None = None
    """Who is charged."""
    walltime: Annotated[str, Field(pattern=r"^(\d+-)?\d{1,3}:\d{2}:\d{2}$")] = "24:00:00"
    """Longest time of a job. The engine of one that ended is started again in a new one."""
    cores: Annotated[int, Field(ge=1)] = 8
    """Of a job."""
    memory_gb: Annotated[int, Field(ge=1)] = 64
    """Of a job."""
    gpus: Annotated[int, Field(ge=0)] = 1
    """Of a job (--gpus)."""
    directives: tuple[Word, ...] = ()
    """Further ones, such as --constraint=h200."""
    prologue: tuple[str, ...] = ()
    """Lines of the job's script before the worker starts, such as `source /opt/rollmill/bin/activate`."""
    python: Word | None = None
    """Interpreter there that has Rollmill; None is the path of this one."""

    @property
    def engines(self) -> int:
        return self.jobs


class KubernetesPools(_Beyond):
    """Engines as pods of a Kubernetes job, started from a machine or a pod that they reach (extra `kubernetes`). The
    cluster is the one of the kubeconfig, or the one that this process runs in."""

    elsewhere = "pods"
    type: Literal["kubernetes"] = "kubernetes"
    pods: Annotated[int, Field(ge=1)]
    """Engines, a pod each."""
    image: Word
    """Image with Rollmill (`deploy/Dockerfile`, target `cuda`)."""
    namespace: Name = "default"
    """Where the pods run."""
    secret: Name = "rollmill-store"
    """Secret whose entries are the pods' environment: the store's credentials and endpoint."""
    cores: Annotated[int, Field(ge=1)] = 4
    """Of a pod."""
    memory_gb: Annotated[int, Field(ge=1)] = 32
    """Of a pod."""
    gpus: Annotated[int, Field(ge=0)] = 1
    """Of a pod (nvidia.com/gpu)."""
    node_selector: dict[Word, Word] = Field(default_factory=dict)
    """Labels of the nodes that the pods may run on."""

    @property
    def engines(self) -> int:
        return self.pods


Pools = Annotated[LocalPools | SchedulerPools | SSHPools | SlurmPools | KubernetesPools, Field(discriminator="type")]
"""Where stages run."""
