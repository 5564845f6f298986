"""Reads a plan: a scenario, and what a search may change of it.

Invariants: the only exception is ConfigError, whose message has a line per mistake with field, value and mend; a plan
that is read can be simulated.
"""

from __future__ import annotations

import reprlib
from importlib.resources import files
from pathlib import Path

import yaml
from pydantic import ValidationError

from rl.config.base import Section
from rl.errors import ConfigError
from sim.config import Scenario
from sim.profiles import hardware, language_model
from sim.search import SearchSection

PLANS = files("sim") / "data" / "plans"


class PlanFile(Section):
    """What `rollmill simulate` reads."""

    scenario: Scenario
    search: SearchSection | None = None
    """None simulates the scenario as it is."""


def plan_names() -> list[str]:
    """The plans that ship."""
    return sorted(entry.name.removesuffix(".yaml") for entry in PLANS.iterdir() if entry.name.endswith(".yaml"))


def load_plan(source: str) -> PlanFile:
    """The plan of a file, or one that ships, by name."""
    if source in plan_names():
        text = (PLANS / f"{source}.yaml").read_text()
    elif Path(source).is_file():
        text = Path(source).read_text()
    else:
        raise ConfigError(f"{source!r} is neither a file nor a plan; the plans are {', '.join(plan_names())}")
    try:
        plan = PlanFile.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {_line(e)}" for e in error.errors())) from error
    language_model(plan.scenario.model)
    for name in (plan.scenario.trainer.hardware, *(pool.hardware for pool in plan.scenario.pools)):
        hardware(name)
    return plan


def _line(error: object) -> str:
    assert isinstance(error, dict)
    field = ".".join(str(part) for part in error["loc"]) or "plan"
    return f"{field}: {error['msg'].removeprefix('Value error, ')} (found {reprlib.repr(error['input'])})"
