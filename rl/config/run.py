"""The root of the configuration tree.

Invariants: importable without torch; unknown fields are errors; whatever can be cross-checked without
starting anything is checked here; the resolved tree is stored with the run and is all that a process needs to
join it.
"""

from __future__ import annotations

import math
from typing import Annotated, Self

from pydantic import Field, model_validator

from rl.advantages.registry import BUILT_IN
from rl.config.alerts import AlertSection
from rl.config.base import Name, Section
from rl.config.engine import EngineSection, HFEngineSection, check_engine
from rl.config.infrastructure import (
    LOOPBACK,
    LocalPools,
    MooncakeWeights,
    RestartSection,
    S3Weights,
    SchedulerPools,
    StoreSection,
    TrackingSection,
)
from rl.config.model import ModelSection, ServiceModel, TinyModel
from rl.config.pools import Pools
from rl.config.retention import RetentionSection
from rl.config.rewards import JudgeSection, LambdaFunctions, LocalFunctions
from rl.config.training import TrainingSection
from rl.config.work import DeadlineSection, DomainSection, EvaluationSection, RolloutSection, StalenessSection
from rl.modes import MODES, Mode
from rl.placement import HardwareClass, Placement
from rl.retention import Retention
from rl.selection import DropPolicy
from rl.staleness import StalenessPolicy
from rl.stream import ProblemStream

SERVICES = "services"
"""Owner of what services for many tenants keep; no tenant of theirs may be called so."""


def service_prefix(name: str) -> str:
    """Key prefix of what a service keeps."""
    return f"{SERVICES}/{name}/"


class RunConfig(Section):
    """One run: a policy, its work and where it runs."""

    name: Name
    """Name of the run; with the tenant it is its prefix in the store."""
    tenant: Name = "default"
    """Owner of the run's prefix."""
    seed: int = 0
    """Of the problem stream, the sampler and the optimizer."""
    deterministic: bool = False
    """Seed every turn by (ordinal, attempt, member, turn) and decode with one fixed batch shape, so that a
    run under alpha = 0 repeats bit by bit. Slower."""
    model: ModelSection = ModelSection()
    domains: Annotated[tuple[DomainSection, ...], Field(min_length=1)]
    """What is trained on, each with its share."""
    rollout: RolloutSection = RolloutSection()
    staleness: StalenessSection = StalenessSection()
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()
    engine: EngineSection = HFEngineSection()
    pools: Pools = LocalPools()
    serverless: Annotated[LocalFunctions | LambdaFunctions, Field(discriminator="type")] | None = None
    """Where rewards with the `@serverless` mark run; None runs them, as all others, on the workers of the class
    `lambda`."""
    judge: JudgeSection | None = None
    """The model that judges, for rewards that ask one."""
    store: StoreSection = StoreSection()
    weights: Annotated[S3Weights | MooncakeWeights, Field(discriminator="type")] = S3Weights()
    retention: RetentionSection = RetentionSection()
    tracking: TrackingSection = TrackingSection()
    alerts: AlertSection = AlertSection()
    deadlines: DeadlineSection = DeadlineSection()
    restarts: RestartSection = RestartSection()

    @model_validator(mode="after")
    def _cross_check(self) -> Self:
        names = [d.name for d in self.domains]
        if len(set(names)) != len(names):
            raise ValueError(f"domains: two domains have one name in {names}; give each its own")
        if self.rollout.max_new_tokens >= self.rollout.max_tokens:
            raise ValueError(
                f"rollout.max_new_tokens ({self.rollout.max_new_tokens}) leaves no room for a prompt in "
                f"rollout.max_tokens ({self.rollout.max_tokens}); raise the latter"
            )
        if self.model.warmstart is None and isinstance(self.model.source, TinyModel):
            raise ValueError("model.warmstart is missing, but a tiny model starts from random weights; add the section")
        if isinstance(self.model.source, ServiceModel) and (
            self.model.lora is None or self.model.warmstart is not None
        ):
            raise ValueError(
                f"model.source: the base of service {self.model.source.name!r} is everybody's and stays as it is; set "
                f"model.lora, and leave model.warmstart away"
            )
        if not isinstance(self.pools, SchedulerPools):
            slots = self.pools.slots
            members = self.policy.buffer_groups * self.training.group_size
            if slots["cpu"] < self.training.group_size:
                raise ValueError(
                    f"{self.pools.field('cpu')} ({slots['cpu']}) is below training.group_size "
                    f"({self.training.group_size}): no group could run; raise it, up to {members} are used"
                )
            for name, engines in self.engine_slots.items():
                trains = name == "compute_gpu"
                if (given := slots[name]) < engines + trains:
                    users = [f"{engines} engine{'s' * (engines > 1)}"] * bool(engines) + ["the trainer"] * trains
                    users[0] += " (one for evaluation.every)" * (self.engine.counts.get(name, 0) < engines)
                    raise ValueError(
                        f"{self.pools.field(name)} ({given}) is below {engines + trains}, but "
                        f"{' and '.join(users)} run there; set it to {engines + trains}"
                    )
            if slots["compute_gpu"] < 1:
                raise ValueError(f"{self.pools.field('compute_gpu')} is 0, but the trainer runs there; set it to 1")
        if self.pools.host != LOOPBACK and self.engine.embedded:
            raise ValueError(
                f"pools.host ({self.pools.host}) is for engines on other machines, but the engine is within the proxy; "
                f"set engine.instances to {{bandwidth_gpu: 1}} or more"
            )
        if self.training.group_size * self.training.groups_per_step % self.training.processes:
            raise ValueError(
                f"training.processes ({self.training.processes}) does not divide the batch of "
                f"{self.training.group_size * self.training.groups_per_step} trajectories; choose a divisor"
            )
        check_engine(self.engine)
        if self.deterministic and not self.engine.embedded:
            raise ValueError(
                f"engine ({self.engine.type}) must be the one within the proxy in a deterministic run; leave "
                f"engine.type at hf and engine.instances away, or set deterministic to false"
            )
        if self.deterministic and self.training.examine_factor != 1.0:
            raise ValueError(
                f"training.examine_factor ({self.training.examine_factor}) must be 1 in a deterministic run, "
                f"for refilling depends on arrival; set it to 1 or deterministic to false"
            )
        if self.mode.lockstep:
            self._check_lockstep()
            if self.rollout.unit == "stage":
                raise ValueError(
                    "rollout.unit (stage) watches the stages of every member, but in staleness.mode sync they run "
                    "together; set it to trajectory, or choose another mode"
                )
        if self.training.advantage not in BUILT_IN and ":" not in self.training.advantage:
            raise ValueError(
                f"training.advantage ({self.training.advantage!r}) is none of {', '.join(BUILT_IN)}; "
                f"name one of them or your own as 'module:attribute'"
            )
        return self

    def _check_lockstep(self) -> None:
        """A whole batch of environments has to be alive at once, or its first turn would never come."""
        together = self.policy.buffer_groups * self.training.group_size
        for at, domain in enumerate(self.domains):
            if domain.concurrency is not None and domain.concurrency < together:
                raise ValueError(
                    f"domains.{at}.concurrency ({domain.concurrency}, of {domain.name!r}) is below the {together} "
                    f"environments that staleness.mode sync steps together; leave it away or choose sync_plus"
                )

    @property
    def prefix(self) -> str:
        """Key prefix of the run in the bucket, with a closing slash."""
        return f"{self.tenant}/{self.name}/"

    @property
    def base_prefix(self) -> str:
        """Key prefix of the base model, with a closing slash; only the base of a service is shared."""
        source = self.model.source
        return f"{service_prefix(source.name) if isinstance(source, ServiceModel) else self.prefix}base/"

    @property
    def served_as(self) -> str:
        """Whose policy it is to engines and proxy: the tenant and the run, or nobody for a whole model, of which they
        have one."""
        return f"{self.tenant}.{self.name}" if self.model.lora is not None else ""

    @property
    def policy(self) -> StalenessPolicy:
        t = self.training
        examined = math.ceil(t.groups_per_step * t.examine_factor) if t.dynamic_sampling else t.groups_per_step
        examined = self.rollout.redundancy.policy().examined(t.groups_per_step, examined)
        alpha = self.staleness.alpha
        return StalenessPolicy(self.mode.bound(alpha), t.groups_per_step, examined, t.steps, admission=alpha)

    @property
    def engine_slots(self) -> dict[str, int]:
        """Slots that engines hold, by hardware class: those of rollout and the one that evaluates beside it."""
        counts = dict(self.engine.counts)
        if self.evaluation.every is not None and self.evaluation.problems:
            for name, count in self.engine.single.counts.items():
                counts[name] = counts.get(name, 0) + count
        return counts

    @property
    def mode(self) -> Mode:
        return MODES[self.staleness.mode]

    @property
    def waits(self) -> bool:
        """Whether a step waits for what it would make too old."""
        return self.mode.waits and self.staleness.late == "wait" and not self.rollout.redundancy.forgets

    @property
    def drops(self) -> DropPolicy:
        return DropPolicy(
            self.rollout.stale_attempts,
            self.rollout.failed_attempts,
            not self.training.dynamic_sampling,
            self.rollout.redundancy.forgets,
        )

    @property
    def keeps(self) -> Retention:
        return Retention(self.retention.newest, self.retention.younger_than, self.retention.every)

    @property
    def stream(self) -> ProblemStream:
        return ProblemStream(self.seed, {d.name: d.weight for d in self.domains})

    @property
    def generation(self) -> Placement:
        """Where generations run best, by domain."""
        declared = {d.name: HardwareClass(d.runs_on) for d in self.domains if d.runs_on is not None}
        return Placement(declared, HardwareClass.BANDWIDTH_GPU)

    def domain(self, name: str) -> DomainSection:
        return next(d for d in self.domains if d.name == name)
