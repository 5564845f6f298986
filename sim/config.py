"""The typed description of a cluster and its work: what `rollmill simulate` reads.

Invariants: as everywhere, unknown fields are errors and values are frozen; times are seconds, sizes tokens or bytes.
The fields of `Efficiency` are what was fitted to published runs (`sim.validation.rows` names the rows); all else is
either a fact about hardware and models or a choice of the scenario.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rl.config.base import Name, Section
from rl.modes import MODES, ModeName
from rl.placement import HardwareClass

Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Latency(Section):
    """A time that varies: mean and standard deviation, and now and then a long one on top."""

    mean: NotNegative
    sd: NotNegative = 0.0
    shape: Literal["lognormal", "normal"] = "lognormal"
    """`normal` is cut at 0."""
    tail_share: Share = 0.0
    """How often an exponential of mean `tail_mean` is added."""
    tail_mean: NotNegative = 0.0


class DomainWork(Section):
    """What the trajectories of one domain ask of engines, environments and rewards."""

    name: Name
    weight: Positive = 1.0
    """Share of the problem stream, relative to the other domains."""
    turns: tuple[Count, Count]
    """Fewest and most, uniform between them."""
    prompt_tokens: Positive = 512
    observation_tokens: NotNegative = 128
    """Per turn."""
    response_tokens: Positive = 256
    """Per turn, mean."""
    problem_spread: NotNegative = 0.2
    """Of a problem's response length: sigma of a lognormal of mean 1, the same for the members of a group."""
    member_spread: NotNegative = 0.3
    """Of a trajectory's."""
    turn_spread: NotNegative = 0.5
    """Of a turn's."""
    max_tokens: Positive = 32_768
    """A trajectory ends there."""
    prefix_hit: Share = 1.0
    """Share of a turn's history that the engine still has in its cache."""
    reset: Latency = Latency(mean=1.0, sd=0.5)
    step: Latency = Latency(mean=0.1, sd=0.05)
    score: Latency = Latency(mean=0.1)
    """Work of one reward, on one slot."""
    failure: Share = 0.0
    """Of a member: its environment fails at some turn, and the member is tried afresh."""
    environments: Count | None = None
    """Of this domain, of all tenants together: further trajectories wait until one is free. None has enough."""
    runs_on: HardwareClass | None = None
    """Where it is best generated; None has no preference."""


class PoolSection(Section):
    """Engines of one kind."""

    hardware: str
    """A profile of `sim/data/hardware.yaml`."""
    gpus: Count
    hardware_class: HardwareClass
    tensor_parallel: Count = 1
    """GPUs per engine."""
    max_sequences: Count = 64
    """Of one engine; a pool with so many on each is full, and its domains fall back to a compatible class."""
    role: Literal["both", "prefill", "decode"] = "both"
    """With `prefill` and `decode` pools a turn's prompt is read on the one and answered on the other."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.gpus % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel ({self.tensor_parallel}) does not divide gpus ({self.gpus}); choose a divisor"
            )
        return self


class TrainerSection(Section):
    """Who makes the steps."""

    hardware: str = "H800"
    gpus: Count
    colocated: bool = False
    """The trainer's GPUs are those of the engines, and take turns with them: they cost nothing more."""


class WeightsSection(Section):
    """How a version comes from the trainer to the engines."""

    mode: Literal["inline", "overlapped"] = "overlapped"
    """`inline`: pushed and pulled while the engines stand still; `overlapped`: pushed and pulled beside the work, in
    buckets, and only what is left of the pull is exposed."""


class RewardSection(Section):
    """Where rewards are computed."""

    type: Literal["serverless", "dedicated"] = "serverless"
    slots: Count = 1
    """Of `dedicated`: rewards at once."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """Of `dedicated`: GPUs that they occupy."""
    hardware: str = "H800"
    cold_start: NotNegative = 1.0
    """Of `serverless`: seconds before an instance that is not warm answers."""
    keep_warm: NotNegative = 300.0
    """Of `serverless`: seconds that an idle instance is kept."""


class Redundancy(Section):
    """More than needed is launched, and the rest ended when there is enough (`rl.redundancy`)."""

    mode: Literal["replace_failures", "first_finished"] = "replace_failures"
    extra_groups: Annotated[int, Field(ge=0)] = 0
    extra_members: Annotated[int, Field(ge=0)] = 0


class Efficiency(Section):
    """The share of a peak that software reaches, and fixed costs: fitted, see `sim.validation.rows`."""

    prefill: Share = 0.5
    """Of peak FLOPs, reading a prompt."""
    decode_compute: Share = 0.6
    """Of peak FLOPs, in a decoding iteration."""
    decode_bandwidth: Share = 0.7
    """Of peak bandwidth, in a decoding iteration."""
    iteration: NotNegative = 0.008
    """Seconds of every decoding iteration beside reading and computing: launches, sampling, scheduling."""
    parallel: NotNegative = 0.0
    """Seconds more per iteration for every doubling of the tensor parallelism."""
    memory: Share = 0.9
    """Of an engine's memory, weights and cache together."""
    train: Share = 0.3
    """Of peak FLOPs, in a training step."""
    train_fixed: NotNegative = 5.0
    """Seconds of every training step beside computing."""
    train_passes: Positive = 4.0
    """Forward passes that a step costs per token: forward and backward are 3, old log-probs 1 more."""
    mixing: NotNegative = 0.0
    """Slowdown of decoding while an engine also reads prompts, beyond the time that reading takes."""
    adapters: NotNegative = 0.05
    """Slowdown of decoding when several adapters share a batch."""
    push_bandwidth: Positive = 0.474e9
    """Bytes per second from trainer to store."""
    tcp_bandwidth: Positive = 2.18e9
    """Bytes per second from store to an engine over TCP."""
    pull_bandwidth: Positive = 5.99e9
    """Bytes per second of an engine's pull from memory nearby."""
    pull_hidden: NotNegative = 1.33
    """Seconds of a pull that its prefetch hides."""
    rdma_bandwidth: Positive = 11.3e9
    rdma_fixed: NotNegative = 3.6
    """Seconds of an RDMA transfer beside moving bytes."""
    adapter_swap: NotNegative = 1.0
    """Seconds in which a tenant's adapter comes to the engines, which go on with those of others."""
    adapter_push: NotNegative = 0.0
    """Seconds in which a tenant's version comes from the trainer to the store."""
    kv_bandwidth: Positive = 20e9
    """Bytes per second of cache from a prefill engine to a decode engine."""


class TenantSection(Section):
    """What one tenant has of its own."""

    domains: tuple[Name, ...] = ()
    """Of the scenario's, those that it trains on; none named is all."""
    priority: int = 0
    """As of a job (`rl.config.tenants`), with weight and quota."""
    weight: Positive = 1.0
    quota: Count | None = None
    submitted: NotNegative = 0.0
    """When it hands its job in."""
    begins: NotNegative = 0.0
    """Seconds from getting a place to its first version being served."""


class Scenario(Section):
    """A cluster, its work, and how long to look at it."""

    name: Name = "plan"
    seed: int = 0
    model: str = "Qwen3-8B"
    """A profile of `sim/data/models.yaml`."""
    domains: Annotated[tuple[DomainWork, ...], Field(min_length=1)]
    pools: Annotated[tuple[PoolSection, ...], Field(min_length=1)]
    trainer: TrainerSection
    weights: WeightsSection = WeightsSection()
    reward: RewardSection = RewardSection()
    redundancy: Redundancy = Redundancy()
    efficiency: Efficiency = Efficiency()
    alpha: Annotated[int, Field(ge=0, le=16)] = 1
    """The staleness bound."""
    mode: ModeName = "rollart"
    """How rollout and training relate in time: see `rl.modes`."""
    late: Literal["wait", "draw_again"] = "wait"
    """What a step does about groups in flight that it makes too old: wait for them, or have their problems drawn
    again."""
    batches: Literal["free", "blocks"] = "free"
    """`free`: what is ready makes a batch, as in a run. `blocks`: a step trains the groups that were drawn for it and
    no others, as where every batch takes one group of each environment."""
    tenants: Count = 1
    """Runs that share engines and trainer, each with this work, its own versions and its own adapter."""
    shares: tuple[TenantSection, ...] = ()
    """What the tenants have of their own, in this order and again from the first; none: they are alike."""
    running: Count | None = None
    """Tenants that run at once; further ones wait for a place. None is all."""
    schedule: Literal["free", "rounds"] = "free"
    """As of a service: `rounds` makes all tenants roll out one version each, and none begins the next before all have
    trained it."""
    affinity: bool = True
    """Whether `runs_on` of the domains is followed."""
    groups_per_step: Count = 64
    group_size: Annotated[int, Field(ge=1)] = 8
    max_concurrent: Count | None = None
    """Trajectories that may run at once, by the number of environments; None is what alpha allows. Tenants share them
    as `rl.fairness` says."""
    adaptive: bool = False
    """Whether fewer run where the engines can not take as many, found by trying as in a service (`rl.concurrency`);
    `max_concurrent` is the most."""
    routing: Literal["trajectory", "turn"] = "trajectory"
    """`turn` asks the router of the running system (`rl.routing`) where each turn goes, and makes it wait where none
    has room. `trajectory` leaves it on the least loaded engine of its class, and is many times faster."""
    turns_at_once: Count = 1
    """Turns of a trajectory that are played as one: for large clusters, whose clock may then tick more slowly."""
    steps: Count = 8
    """Stop after this many versions ..."""
    horizon: Positive | None = None
    """... or after this many seconds."""
    warmup: Annotated[int, Field(ge=0)] = 2
    """Versions before the measuring begins."""
    tick: Positive | None = None
    """Seconds of one tick of the clock; None derives it from the shortest turn."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [d.name for d in self.domains]
        if len(set(names)) != len(names):
            raise ValueError(f"domains: two domains have one name in {names}; give each its own")
        roles = {p.role for p in self.pools}
        if ("prefill" in roles) != ("decode" in roles):
            raise ValueError("pools: a prefill pool needs a decode pool and the other way round; add the missing one")
        if roles == {"both", "prefill", "decode"}:
            raise ValueError("pools: either all are of role both, or each is prefill or decode")
        if wrong := {name for one in self.shares for name in one.domains} - set(names):
            raise ValueError(f"shares: there is no domain {sorted(wrong)[0]!r} in {names}; name one of them")
        small = [one.quota for one in self.shares if one.quota is not None and one.quota < self.members]
        if small:
            raise ValueError(
                f"shares: a quota ({small[0]}) is below the {self.members} trajectories of a group: no group could "
                f"run; raise it"
            )
        if self.max_concurrent is not None and self.max_concurrent < self.members:
            raise ValueError(
                f"max_concurrent ({self.max_concurrent}) is below the {self.members} trajectories of a group: no group "
                f"could run; raise it"
            )
        if (why := MODES[self.mode].refuse(self.alpha)) is not None:
            raise ValueError(why.replace("staleness.", ""))
        if self.adaptive and self.max_concurrent is None:
            raise ValueError("adaptive needs max_concurrent, the most that may run; set it")
        if self.routing == "turn" and roles != {"both"}:
            raise ValueError("routing is turn, but the pools have roles; make them both, or route by trajectory")
        if self.late == "draw_again" and not MODES[self.mode].waits:
            raise ValueError(f"late is draw_again, but in mode {self.mode} no step is late; leave it away")
        if self.steps <= self.warmup:
            raise ValueError(f"steps ({self.steps}) must be above warmup ({self.warmup}); raise it")
        return self

    @property
    def members(self) -> int:
        """Trajectories that are started for a group."""
        return self.group_size + self.redundancy.extra_members

    @property
    def gpus(self) -> int:
        """GPUs of the plan, rewards included."""
        trainer = 0 if self.trainer.colocated else self.trainer.gpus
        return sum(p.gpus for p in self.pools) + trainer + self.reward.gpus
