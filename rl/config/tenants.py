"""A service in which many tenants train adapters on one base, and the jobs that they bring.

Invariants: a job becomes a whole `RunConfig` (`Job.run`), so that whatever works on a run works on it; what is wrong
with a job is told, by field, when it is submitted; a job can not name what the service decides (base, engines, pools,
store), nor run code that its operator did not install, unless the service says so.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rl.config.base import Name, Section
from rl.config.engine import EngineSection, HFEngineSection, VLLMEngineSection
from rl.config.infrastructure import (
    LocalPools,
    MooncakeWeights,
    RestartSection,
    S3Weights,
    SchedulerPools,
    StoreSection,
    TrackingSection,
)
from rl.config.load import validate
from rl.config.model import LoraSection, ModelSection, ServiceModel
from rl.config.pools import Pools
from rl.config.retention import RetentionSection
from rl.config.rewards import JudgeSection, LambdaFunctions, LocalFunctions
from rl.config.run import SERVICES, RunConfig, service_prefix
from rl.config.training import TrainingSection
from rl.config.work import DeadlineSection, DomainSection, EvaluationSection, RolloutSection, StalenessSection
from rl.errors import ConfigError
from rl.fairness import TenantShare

ALPHA = 0
"""Staleness bound of a job that names none: other tenants keep the machine busy."""


class QueueSection(Section):
    """The order in which completed batches are trained (`rl/fairness.py`): as they came, with these exceptions."""

    slack: Annotated[float, Field(ge=0)] = 30.0
    """Seconds of training that a job may have had above the least served of those waiting, by weight, before it stands
    back."""
    patience: Annotated[int, Field(ge=1)] = 64
    """A batch that was passed over so often goes next, whatever the priorities; and so does the next group of a job
    that wants to start one, and was passed over by so many groups of others."""


class ServiceConfig(Section):
    """One base, its engines and its trainers."""

    name: Name
    """Name of the service; its prefix in the store is `services/<name>/`."""
    seed: int = 0
    """Of the initial weights, where they are made here."""
    model: ModelSection = ModelSection()
    """The base. It is never changed; each job brings an adapter."""
    domains: Annotated[tuple[DomainSection, ...], Field(min_length=1)]
    """Domains that jobs may ask for by name; a tiny base is warmed up on their experts."""
    foreign_code: bool = False
    """Whether a job may bring environments of its own choice, with options of its own, and rewards and advantages by
    `module:attribute`: whatever they name is run in the service's workers, beside the other tenants. Without it a job
    takes domains that are offered, and may give them another installed reward, weight or limits."""
    trainers: Annotated[int, Field(ge=1)] = 1
    """Trainer processes, which train different jobs at the same time. Each holds the base."""
    threads: Annotated[int, Field(ge=1)] = 1
    """torch threads of each trainer."""
    resident: Annotated[int, Field(ge=1)] = 8
    """Jobs whose adapter and optimizer a trainer holds in memory; those of the others lie in the store until their
    next step."""
    running: Annotated[int, Field(ge=1)] = 64
    """Jobs that run at once; further ones wait, in the order of priority and arrival."""
    trajectories: Annotated[int, Field(ge=2)] | None = None
    """Trajectories in flight at once, of all jobs together. None follows what the engines have room for."""
    schedule: Literal["free", "rounds"] = "free"
    """`free`: every job rolls out as soon as its own version is served. `rounds`: all jobs roll out one version each,
    and no one begins the next before all have trained it; synchronous, what asynchrony is measured against."""
    largest_rank: Annotated[int, Field(ge=1, le=512)] = 64
    """Largest rank of an adapter."""
    queue: QueueSection = QueueSection()
    rollout: RolloutSection = RolloutSection()
    """Limits of one sequence in the engines, and what the warm start samples with; jobs bring their own."""
    engine: EngineSection = HFEngineSection()
    pools: Pools = LocalPools()
    serverless: Annotated[LocalFunctions | LambdaFunctions, Field(discriminator="type")] | None = None
    """As of a run."""
    judge: JudgeSection | None = None
    """As of a run."""
    store: StoreSection = StoreSection()
    weights: Annotated[S3Weights | MooncakeWeights, Field(discriminator="type")] = S3Weights()
    retention: RetentionSection = RetentionSection()
    tracking: TrackingSection = TrackingSection()
    deadlines: DeadlineSection = DeadlineSection()
    restarts: RestartSection = RestartSection()

    @model_validator(mode="after")
    def _cross_check(self) -> Self:
        if self.model.lora is not None:
            raise ValueError("model.lora: the service trains no adapter of its own; remove it, each job brings one")
        engines = self.engine.counts.get("compute_gpu", 0)
        wanted = engines + self.trainers
        if not isinstance(self.pools, SchedulerPools) and (given := self.pools.slots["compute_gpu"]) < wanted:
            raise ValueError(
                f"{self.pools.field('compute_gpu')} ({given}) is below {wanted}, but {engines} engines and "
                f"{self.trainers} trainers run there; set it to {wanted}"
            )
        if isinstance(self.engine, VLLMEngineSection) and self.engine.max_adapters < self.running:
            raise ValueError(
                f"engine.max_adapters ({self.engine.max_adapters}) is below running ({self.running}), but each job "
                f"that runs is served by one; lower running, or raise it"
            )
        validate(self._host_tree(), f"service {self.name}")
        return self

    @property
    def prefix(self) -> str:
        """Key prefix of the service's own objects, with a closing slash."""
        return service_prefix(self.name)

    @property
    def host(self) -> RunConfig:
        """The service as a run that trains nothing: what its base, its pools and its engines are started from."""
        return validate(self._host_tree(), f"service {self.name}")

    def _host_tree(self) -> dict[str, Any]:
        shared = (*SHARED, "domains", "rollout")
        return {
            "name": self.name,
            "tenant": SERVICES,
            "seed": self.seed,
            "model": _tree(self.model) | {"lora": {"rank": self.largest_rank}},
            "staleness": {"alpha": 0},
            "training": {"group_size": 2, "groups_per_step": 1},
            **{name: _tree(getattr(self, name)) for name in shared},
        }

    def domain(self, name: str) -> DomainSection | None:
        return next((domain for domain in self.domains if domain.name == name), None)


SHARED = (
    "engine", "pools", "serverless", "judge", "store", "weights", "retention", "tracking", "deadlines", "restarts"
)  # fmt: skip
"""Sections that every job takes from its service."""


class Job(Section):
    """What a tenant wants trained."""

    tenant: Name
    """Whose it is."""
    name: Name
    """With the tenant it is the prefix in the store. Never used again, not even after a deletion."""
    domains: Annotated[tuple[str | DomainSection, ...], Field(min_length=1)]
    """What is trained on: domains of one's own, or names of those that the service offers."""
    seed: int = 0
    """Of the problem stream, the adapter and the optimizer."""
    lora: LoraSection = LoraSection()
    """The adapter."""
    training: TrainingSection = TrainingSection()
    """How far, with how much in a step, by which algorithm."""
    rollout: RolloutSection = RolloutSection()
    """Lengths, temperature, tries."""
    staleness: StalenessSection = StalenessSection(alpha=ALPHA)
    """0 rolls out only under the newest version, 1 and more also while it trains."""
    evaluation: EvaluationSection = EvaluationSection()
    """What `rollmill evaluate` plays; the service itself evaluates nothing."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Higher goes first, in the trainers' queue and in the engines."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the trainers and of the engines, relative to other jobs of this priority."""
    quota: Annotated[int, Field(ge=2)] | None = None
    """Trajectories in flight at once; None is as many as the staleness bound allows."""
    budget: Annotated[int, Field(ge=1)] | None = None
    """Tokens that it may have generated in all; then the job fails by name. None has no end."""

    @property
    def id(self) -> str:
        return f"{self.tenant}/{self.name}"

    @property
    def share(self) -> TenantShare:
        return TenantShare(self.weight, self.priority, self.quota)

    @property
    def group(self) -> int:
        """The fewest trajectories that start together: a group, with the spares that were asked for by number."""
        return self.training.group_size + (self.rollout.redundancy.extra_members or 0)

    @property
    def _group(self) -> str:
        spares = self.group - self.training.group_size
        more = f" with rollout.redundancy.extra_members ({spares})" if spares else ""
        return f"training.group_size ({self.training.group_size}){more}"

    def run(self, service: ServiceConfig) -> RunConfig:
        """The job as a run. Raises ConfigError for one that this service can not do."""
        self._check(service)
        domains = [self._domain(service, domain) for domain in self.domains]
        model = {
            "source": _tree(ServiceModel(name=service.name)),
            "lora": _tree(self.lora),
            "dtype": service.model.dtype,
        }
        own = ("name", "tenant", "seed", "training", "rollout", "staleness", "evaluation")
        tree = {name: _tree(getattr(self, name)) for name in own}
        tree |= {name: _tree(getattr(service, name)) for name in SHARED}
        return validate(tree | {"model": model, "domains": domains}, f"job {self.id}")

    def _domain(self, service: ServiceConfig, domain: str | DomainSection) -> Any:
        if isinstance(domain, DomainSection):
            return _tree(domain)
        if (offered := service.domain(domain)) is None:
            raise ConfigError(
                f"job {self.id}: domains: {domain!r} is not offered by service {service.name!r}, which has "
                f"{', '.join(d.name for d in service.domains)}; name one of them, or give a whole domain"
            )
        return _tree(offered)

    def _check(self, service: ServiceConfig) -> None:
        if self.tenant == SERVICES:
            raise ConfigError(
                f"job {self.id}: tenant ({self.tenant!r}) is where services keep their own; choose another"
            )
        if self.lora.rank > service.largest_rank:
            raise ConfigError(
                f"job {self.id}: lora.rank ({self.lora.rank}) is above largest_rank of service {service.name!r} "
                f"({service.largest_rank}); lower it"
            )
        if self.quota is not None and self.quota < self.group:
            raise ConfigError(
                f"job {self.id}: quota ({self.quota}) is below {self._group}: no group could run; raise it"
            )
        known = None if isinstance(service.pools, SchedulerPools) else service.pools.slots["cpu"]
        for name, most in (("trajectories", service.trajectories), ("pools.cpu", known)):
            if most is not None and most < self.group:
                raise ConfigError(
                    f"job {self.id}: {self._group} is above {name} of service {service.name!r} ({most}): no group "
                    f"could run; lower it"
                )
        if self.rollout.unit != "group":
            raise ConfigError(
                f"job {self.id}: rollout.unit ({self.rollout.unit!r}): the rollout of a service has a task run, and a "
                f"thread, for each group; leave it away"
            )
        if self.training.processes != 1:
            raise ConfigError(
                f"job {self.id}: training.processes ({self.training.processes}): a job is trained by one process of "
                f"its service; leave it away"
            )
        if self.evaluation.every is not None:
            raise ConfigError(
                f"job {self.id}: evaluation.every ({self.evaluation.every}): a service evaluates nothing on the way; "
                f"leave it away, and use `rollmill evaluate`"
            )
        if self.training.threads != 1:
            raise ConfigError(
                f"job {self.id}: training.threads ({self.training.threads}): the trainers of a service have its "
                f"threads; leave it away"
            )
        if self.training.checkpoint_every != 1:
            raise ConfigError(
                f"job {self.id}: training.checkpoint_every ({self.training.checkpoint_every}): every version of a job "
                f"is a point to go on from, for its trainer may have to let go of it; leave it away"
            )
        if not service.foreign_code and (found := next(iter(self._foreign(service)), None)) is not None:
            raise ConfigError(
                f"job {self.id}: {found} is code of one's own choice, which service {service.name!r} does not run "
                f"(foreign_code is false); take a domain that it offers, and what is installed"
            )

    def _foreign(self, service: ServiceConfig) -> list[str]:
        """What the job wants run that the service does not offer. Options of an environment may name a program."""
        found = []
        if ":" in self.training.advantage:
            found.append(f"training.advantage ({self.training.advantage!r})")
        for domain in self.domains:
            if isinstance(domain, str):
                continue
            offered = service.domain(domain.name)
            wanted = (domain.environment, domain.environment_options)
            if offered is None or (offered.environment, offered.environment_options) != wanted:
                found.append(f"domains.{domain.name}.environment ({domain.environment!r}, with its options)")
            rewards = [term.name for term in domain.terms if ":" in term.name]
            found += [f"domains.{domain.name}.reward ({name!r})" for name in rewards]
        return found


def _tree(section: Any) -> Any:
    if isinstance(section, Section):
        return section.model_dump(mode="json", by_alias=True)
    return [_tree(one) for one in section] if isinstance(section, tuple) else section
