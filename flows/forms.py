"""What one fills in to start a flow from Prefect's UI, by `prefect deployment run`, or on a schedule.

Invariants: a form names a configuration and says what differs; it holds no secret and nothing heavy, for Prefect keeps
it with every flow run; what it resolves to is checked as on the command line, with the same errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, JsonValue

from flows.configure import read_config, read_section
from rl.config.base import Name, Section
from rl.config.run import RunConfig
from rl.config.tenants import Job, ServiceConfig


class RunForm(Section):
    """Which run."""

    configuration: str = "calculator"
    """A preset (`rollmill presets`), or a YAML file on the machine that runs the flow."""
    name: Name | None = None
    """The run's name; left away it is the configuration's."""
    tenant: Name | None = None
    """The owner of the run; left away it is the configuration's."""
    overrides: dict[str, JsonValue] = Field(default_factory=dict)
    """Fields that differ from the configuration, by dotted path: {"training.steps": 200, "staleness.alpha": 2}."""

    def config(self) -> RunConfig:
        """The resolved configuration. Raises ConfigError."""
        named = {"name": self.name, "tenant": self.tenant}
        return read_config(self.configuration, self.overrides | {k: v for k, v in named.items() if v is not None})

    @property
    def title(self) -> str:
        return self.name or self.configuration


class TrainForm(RunForm):
    """Which run to train, and how far."""

    resume: bool = True
    """Go on from the newest commit of a run that exists. Switched off, such a run is an error."""
    more_steps: Annotated[int, Field(ge=1)] | None = None
    """Train so many versions beyond the newest commit, whatever `training.steps` says: for schedules. Left away,
    train up to `training.steps`."""


class EvaluateForm(RunForm):
    """Whose version to evaluate on its held-out problems."""

    version: Annotated[int, Field(ge=0)] | None = None
    """Which one (`rollmill versions list`). Left away: the newest."""


class WarmStartForm(RunForm):
    """Whose base model to teach by demonstrations. The result is kept on the machine, for the runs that want it."""


class ServiceForm(Section):
    """Which service for many tenants."""

    service: str = "lake"
    """A preset of a service, or a YAML file on the machine that runs the flow."""
    overrides: dict[str, JsonValue] = Field(default_factory=dict)
    """Fields that differ from it, by dotted path."""

    def config(self) -> ServiceConfig:
        """The resolved service. Raises ConfigError."""
        return read_section(ServiceConfig, self.service, self.overrides, "services")


class TenantsForm(ServiceForm):
    """Which service to run for many tenants."""

    until_idle: bool = False
    """End when all jobs are over, once there was one."""


class JobForm(ServiceForm):
    """A job, and the service that it is for, which runs already."""

    job: Job
    """What is to be trained, for whom, how far."""


class SimulateForm(Section):
    """Which cluster to plan (docs/simulator.md)."""

    plan: str = "cluster"
    """A plan that ships, or a YAML file on the machine that runs the flow."""
    directory: str = "plan"
    """Where plan.json and the pictures go, on that machine."""
    from_run: RunForm | None = None
    """A run whose turns, tokens and stage times the plan's domains get. Left away: what the plan says."""

    @property
    def title(self) -> str:
        return Path(self.plan).stem


class CollectForm(Section):
    """What garbage to collect."""

    configuration: str | None = None
    """A preset or file: its run alone. Left away: every run in the bucket, each by the retention policy that it is
    stored with."""
    name: Name | None = None
    """The run's name, if not the configuration's."""
    tenant: Name | None = None
    """The owner of the run, if not the configuration's; without a configuration, of whom every run is collected."""
    bucket: str = "rollmill"
    """Where every run is looked for."""
    dry_run: bool = False
    """Only say what would go."""

    @property
    def title(self) -> str:
        return self.name or self.configuration or self.tenant or "every run"
