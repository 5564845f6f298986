"""Where it runs: pools, store, tracking, orchestration. Secrets come from the environment only."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rl.config.base import Name, Section

LOOPBACK = "127.0.0.1"
GpuClass = Literal["compute_gpu", "bandwidth_gpu"]


class LocalPools(Section):
    """A Dask cluster on this machine; the numbers are slots of each hardware class."""

    type: Literal["local"] = "local"
    compute_gpu: Annotated[int, Field(ge=0)] = 1
    """Trainers."""
    bandwidth_gpu: Annotated[int, Field(ge=0)] = 1
    """Engines."""
    cpu: Annotated[int, Field(ge=1)] = 256
    """Environments running at once, in one worker process."""
    lambda_: Annotated[int, Field(ge=1, alias="lambda")] = 16
    """Rewards scored at once, in one worker process."""
    devices: dict[GpuClass, tuple[tuple[Annotated[int, Field(ge=0)], ...], ...]] = Field(default_factory=dict)
    """GPUs that each slot of a class sees, as nvidia-smi counts them: {compute_gpu: [[0, 1]], bandwidth_gpu: [[2]]}.
    The slots of a class that is left away see all of them."""

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        for name, seen in self.devices.items():
            if len(seen) != (slots := getattr(self, name)):
                raise ValueError(
                    f"devices.{name} names the GPUs of {len(seen)} slots, but {name} is {slots}; give one list for each"
                )
        return self

    @property
    def slots(self) -> dict[str, int]:
        """By hardware class."""
        return {
            "compute_gpu": self.compute_gpu,
            "bandwidth_gpu": self.bandwidth_gpu,
            "cpu": self.cpu,
            "lambda": self.lambda_,
        }

    def field(self, name: str) -> str:
        """Where a user wrote the slots of a class."""
        return f"pools.{name}"

    @property
    def host(self) -> str:
        """Where the proxy listens."""
        return LOOPBACK


class SchedulerPools(Section):
    """An existing Dask scheduler whose workers carry the resources compute_gpu, bandwidth_gpu, cpu and
    lambda."""

    type: Literal["scheduler"] = "scheduler"
    address: Annotated[str, Field(pattern=r"^(tcp|tls)://.+:\d+$")]
    """Such as tls://scheduler:8786. Plain tcp is accepted on loopback only."""
    host: str = LOOPBACK
    """Address at which engines on other machines reach the proxy, which runs on a worker of the class cpu: the machine
    that has them all. Leave it away where everything is on one machine."""

    @property
    def slots(self) -> None:
        """Not known before the scheduler is asked."""
        return None


class StoreSection(Section):
    """The S3 bucket. Credentials come from the AWS_* environment variables; so does the endpoint, unless
    given here."""

    bucket: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")] = "rollmill"
    """On AWS it must exist; elsewhere a missing one is made by whoever begins a run."""
    endpoint_url: str | None = None
    """None uses AWS_ENDPOINT_URL_S3, then AWS itself."""
    region: str = "us-east-1"
    """AWS region."""


class S3Weights(Section):
    """Versions of the weights lie in the store, beside the log."""

    type: Literal["s3"] = "s3"
    bucket_mb: Annotated[int, Field(ge=1)] = 512
    """Size (MiB) of the safetensors files that a version is cut into."""


class MooncakeWeights(Section):
    """The same, with a copy in a Mooncake Store, which engines read first (TCP). For a private network: trainer, proxy
    and engines then listen on every interface of their machines, without authentication, and the library can not be
    told otherwise."""

    type: Literal["mooncake"] = "mooncake"
    master: Annotated[str, Field(pattern=r"^.+:\d+$")]
    """Address of mooncake_master, such as 10.0.0.1:50051."""
    lend_mb: Annotated[int, Field(ge=16)] = 4096
    """Memory (MiB) of the trainer's machine that holds the copies: twice a version at least."""
    bucket_mb: Annotated[int, Field(ge=1)] = 512
    """Size (MiB) of the safetensors files that a version is cut into."""


class TrackingSection(Section):
    """MLflow. The server is MLFLOW_TRACKING_URI, unless given here."""

    enabled: bool = True
    """Log metrics and versions. The store is the truth either way."""
    experiment: Name = "rollmill"
    """MLflow experiment."""
    uri: str | None = None
    """Tracking server."""
    traces: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of the problems of which one trajectory of several turns is logged as a trace. One costs a fifth of a
    second of the server's time."""
    system_metrics: bool = True
    """Log processor, memory, disk, network and GPU of the trainer's machine, every ten seconds."""


class RestartSection(Section):
    """How often a part of a run may die and be started again."""

    rollout: Annotated[int, Field(ge=0)] = 5
    """Rollout flow."""
    trainer: Annotated[int, Field(ge=0)] = 5
    """Trainer."""
    engine: Annotated[int, Field(ge=0)] = 5
    """Each engine, and the proxy."""
