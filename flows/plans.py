"""A plan of a cluster, made: simulated and searched, written to files, told as text.

Invariants: nothing is started; the result is `plan.json`, `steps.png` and `plans.png` in one directory; equal plans
give equal results.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.store.buffer import SampleBuffer
from infra.store.objects import ObjectStore
from infra.tracking.text import text_table
from rl.config.run import RunConfig
from sim import plots
from sim.measured import measured_domains, seconds_per_token
from sim.plan import PlanFile
from sim.search import SearchSection, search
from sim.simulate import hourly_price

NEWEST = 400
"""Groups of a run that are measured."""
SHOWN = 8
"""Plans in the table."""
PICTURES = ("steps.png", "plans.png")
HEAD = ("plan", "step s", "tokens/s", "trainer idle", "engines idle", "lag", "H20 h per million trajectories")


def make_plan(loaded: PlanFile, directory: Path) -> list[dict[str, Any]]:
    """Simulate, search, and write the files; the plans, best first. Raises NoProgress, and ConfigError for a budget
    that is too small."""
    section = loaded.search or SearchSection(rounds=1, alphas=(), spares=(), move_gpus=False)
    tried = search(loaded.scenario, section)
    found = [
        {
            "plan": one.label,
            "given": one.scenario == loaded.scenario,
            "price_per_hour": hourly_price(one.scenario),
            **one.result.figures(),
            "scenario": one.scenario.model_dump(mode="json"),
        }
        for one in tried
    ]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "plan.json").write_text(json.dumps({"objective": section.objective, "plans": found}, indent=2))
    plots.steps(tried[0].result, directory / PICTURES[0])
    plots.plans(tried, directory / PICTURES[1])
    return found


def with_measured(loaded: PlanFile, config: RunConfig) -> tuple[PlanFile, str]:
    """The plan with the work of a run's domains, as its newest groups have it in the store; what was measured, as text.
    Raises ConfigError for a run without trajectories."""
    groups = list(SampleBuffer(ObjectStore.connect(config.store), config.prefix).history(NEWEST))
    domains = measured_domains(groups)
    said = (
        f"{len(groups)} groups measured: {', '.join(d.name for d in domains)}; there a generated token took "
        f"{seconds_per_token(groups) * 1e3:.1f} ms"
    )
    scenario = loaded.scenario.model_copy(update={"domains": domains})
    return loaded.model_copy(update={"scenario": scenario}), said


def plan_table(found: Sequence[dict[str, Any]]) -> str:
    """The best plans."""
    rows = [
        [
            row["plan"],
            f"{row['step_s']:.0f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['trainer_idle']:.0%}",
            f"{row['engine_idle']:.0%}",
            f"{row['lag']:.2f}",
            f"{row['cost']:.0f}",
        ]
        for row in found[:SHOWN]
    ]
    return text_table(HEAD, rows, left={"plan"})


def best_plan(found: Sequence[dict[str, Any]]) -> str:
    """The best one, and what it is better at than the one that was given."""
    best, given = found[0], next(row for row in found if row["given"])
    if best is given:
        return f"best: {best['plan']}, which is the plan as it was given"
    tokens, cost = best["tokens_per_s"] / given["tokens_per_s"] - 1, best["cost"] / given["cost"] - 1
    return f"best: {best['plan']}, against the plan as it was given: {tokens:+.0%} tokens/s, {cost:+.0%} cost"
