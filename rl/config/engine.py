"""The engines that generate: of which kind, how many on which hardware, and how requests are spread over them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rl.config.base import Seconds, Section

GpuClass = Literal["compute_gpu", "bandwidth_gpu"]
HttpUrl = Annotated[str, Field(pattern=r"^https?://[^/]+$")]


class InstancesSection(Section):
    """Engines of each hardware class, each a process of its own on a worker of that class."""

    compute_gpu: Annotated[int, Field(ge=0)] = 0
    """Engines on GPUs with much compute, which prompts want."""
    bandwidth_gpu: Annotated[int, Field(ge=0)] = 0
    """Engines on GPUs with much memory bandwidth, which answers want."""


class RoutingSection(Section):
    """Which engine serves which generation (`rl/routing.py`)."""

    prefill_heavy: Annotated[float, Field(gt=0)] = 32.0
    """New prompt tokens for each expected new token from which on a turn of a domain without `runs_on` goes to
    compute_gpu; others go to bandwidth_gpu."""
    max_waiting: Annotated[int, Field(ge=1)] = 8192
    """Turns that may wait for an engine; further ones are answered 503 with Retry-After."""


class DisaggregationSection(Section):
    """Prompts are computed on engines of one class and answered on those of another."""

    prefill: GpuClass = "compute_gpu"
    """Class that computes prompts."""
    decode: GpuClass = "bandwidth_gpu"
    """Class that answers."""
    min_prompt: Annotated[int, Field(ge=1)] = 512
    """New prompt tokens from which on a turn is split; moving keys and values of a shorter one costs more than it
    saves."""


class ExternalEngine(Section):
    """A `vllm serve` that somebody else runs and that reads this run's files by the same paths. Its key is the
    environment variable ROLLMILL_VLLM_KEY."""

    url: HttpUrl
    """Such as http://10.0.0.7:8000."""
    hardware: GpuClass = "bandwidth_gpu"
    """Class of its GPU."""


class HFEngineSection(Section):
    """transformers, batched continuously."""

    type: Literal["hf"] = "hf"
    max_batch: Annotated[int, Field(ge=1)] = 64
    """Sequences decoded together."""
    threads: Annotated[int, Field(ge=1)] = 1
    """torch threads."""
    mixed_adapters: bool = True
    """Whether one batch may hold sequences of several tenants. Off, it is of one tenant at a time: what mixing is
    measured against."""
    device: str = "auto"
    """torch device; auto takes a GPU where there is one."""
    hardware: GpuClass = "bandwidth_gpu"
    """Class of the worker that hosts the engine within the proxy, where `instances` is not given."""
    instances: InstancesSection | None = None
    """Engines in processes of their own; None is one within the proxy."""
    routing: RoutingSection = RoutingSection()

    @property
    def counts(self) -> dict[str, int]:
        """Slots that engines hold, by hardware class."""
        return {self.hardware: 1} if self.instances is None else self.instances.model_dump()

    @property
    def single(self) -> HFEngineSection:
        """One engine of this kind."""
        return self.model_copy(update={"instances": None})

    @property
    def embedded(self) -> bool:
        """Whether the one engine lives in the proxy."""
        return self.instances is None


class VLLMEngineSection(Section):
    """`vllm serve`, one process for each instance; `rollmill engine install` brings it where there is no GPU."""

    type: Literal["vllm"] = "vllm"
    instances: InstancesSection = InstancesSection(bandwidth_gpu=1)
    external: tuple[ExternalEngine, ...] = ()
    """Servers that run already."""
    max_batch: Annotated[int, Field(ge=1)] = 64
    """Sequences decoded together (--max-num-seqs)."""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Tokens of one sequence (--max-model-len); None is `rollout.max_tokens`."""
    memory: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory (--gpu-memory-utilization)."""
    cpu_cache_gb: Annotated[int, Field(ge=1)] = 1
    """Memory for keys and values on a CPU, in GiB."""
    max_adapters: Annotated[int, Field(ge=1)] = 4
    """Tenants whose adapters are served at once, if adapters are trained."""
    threads: Annotated[int, Field(ge=1)] = 1
    """torch threads, on a CPU."""
    start: Seconds = 600
    """Starting one server, in seconds."""
    extra_args: tuple[str, ...] = ()
    """Further arguments of `vllm serve`."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of `vllm serve`. No secrets: this is stored with the run."""
    disaggregation: DisaggregationSection | None = None
    """Split prompts from answers; None does both on one engine."""
    routing: RoutingSection = RoutingSection()

    @property
    def device(self) -> str:
        """torch device of the sampler that a warm start looks through, which is transformers."""
        return "auto"

    @property
    def counts(self) -> dict[str, int]:
        """Slots that engines hold, by hardware class."""
        return self.instances.model_dump()

    @property
    def single(self) -> VLLMEngineSection:
        """One engine of this kind, on the class that answers where prompts are computed elsewhere."""
        split = self.disaggregation
        where = split.decode if split else "bandwidth_gpu" if self.instances.bandwidth_gpu else "compute_gpu"
        alone = {"instances": InstancesSection(**{where: 1}), "external": (), "disaggregation": None}
        return self.model_copy(update=alone)

    @property
    def embedded(self) -> bool:
        """Whether the one engine lives in the proxy."""
        return False


def _typed(value: Any) -> Any:
    return {"type": "hf", **value} if isinstance(value, dict) else value


EngineSection = Annotated[HFEngineSection | VLLMEngineSection, Field(discriminator="type"), BeforeValidator(_typed)]
"""`type` may be left out: it is hf then."""


def check_engine(engine: HFEngineSection | VLLMEngineSection) -> None:
    """Raise ValueError for engines that can not work together."""
    classes = {name for name, count in engine.counts.items() if count}
    if isinstance(engine, VLLMEngineSection):
        classes |= {external.hardware for external in engine.external}
    if not classes:
        raise ValueError("engine.instances asks for no engine at all; set engine.instances.bandwidth_gpu to 1")
    if isinstance(engine, VLLMEngineSection) and (split := engine.disaggregation) is not None:
        if split.prefill == split.decode:
            raise ValueError(
                f"engine.disaggregation: prefill and decode are both {split.prefill}; name two classes, or remove it"
            )
        started = {name for name, count in engine.counts.items() if count}
        for role in (split.prefill, split.decode):
            if role not in started:
                raise ValueError(
                    f"engine.instances.{role} is 0, but engine.disaggregation needs one there; set it to 1 or more"
                )
