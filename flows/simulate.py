"""The simulate flow: plan a cluster before there is one.

Invariants: nothing is started but what the command needs to read a run that is named (`--from-run`, which `--set` is
for); the result is a table, one JSON file and pictures; with PREFECT_API_URL set it is a flow run there, else a plain
function.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from flows.command import SetOption, console, one_line_errors
from rl.trajectory import Group

NEWEST = 400
"""Groups of a run that are measured."""
SHOWN = 8
"""Plans in the table."""
DirectoryOption = Annotated[Path, typer.Option(help="Where plan.json and the pictures go.")]
FromRunOption = Annotated[
    str | None, typer.Option(help="A run's configuration: take its domains with what was measured in them.")
]


@one_line_errors
def simulate(
    plan: Annotated[str, typer.Argument(help="A YAML file, or the name of a plan that ships, such as cluster.")],
    directory: DirectoryOption = Path("plan"),
    from_run: FromRunOption = None,
    overrides: SetOption = [],  # noqa: B006  typer copies it
) -> None:
    """Simulate a cluster, and look for a better one: throughput, bubbles, cost, staleness bound, spares, GPUs."""
    from sim.plan import load_plan

    loaded = load_plan(plan)
    if from_run is not None:
        from sim.measured import measured_domains, seconds_per_token

        groups = _groups(from_run, overrides)
        domains = measured_domains(groups)
        console.print(
            f"{len(groups)} groups measured: {', '.join(d.name for d in domains)}; there a generated token took "
            f"{seconds_per_token(groups) * 1e3:.1f} ms"
        )
        loaded = loaded.model_copy(update={"scenario": loaded.scenario.model_copy(update={"domains": domains})})
    if "PREFECT_API_URL" in os.environ:
        from prefect import flow

        name = f"simulate {loaded.scenario.name}"
        found = flow(name="simulate", flow_run_name=name, validate_parameters=False)(_plan)(loaded, directory)
    else:
        found = _plan(loaded, directory)
    console.print(_table(found))
    console.print(f"best: {found[0]['plan']}{_gain(found)}", highlight=False, soft_wrap=True)
    console.print(f"report: {directory / 'plan.json'}  plots: {directory / 'steps.png'}, {directory / 'plans.png'}")


def _plan(loaded: Any, directory: Path) -> list[dict[str, Any]]:
    """Simulate, search, and write `plan.json`, `steps.png` and `plans.png`; the plans, best first."""
    from sim import plots
    from sim.search import SearchSection, search
    from sim.simulate import hourly_price

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
    plots.steps(tried[0].result, directory / "steps.png")
    plots.plans(tried, directory / "plans.png")
    return found


def _gain(found: list[dict[str, Any]]) -> str:
    """What the best plan is better at than the one that was given."""
    best, given = found[0], next(row for row in found if row["given"])
    if best is given:
        return ", which is the plan as it was given"
    tokens, cost = best["tokens_per_s"] / given["tokens_per_s"] - 1, best["cost"] / given["cost"] - 1
    return f", against the plan as it was given: {tokens:+.0%} tokens/s, {cost:+.0%} cost"


def _groups(source: str, overrides: list[str]) -> list[Group]:
    """The newest groups of a run, from its store."""
    from flows.command import services
    from flows.configure import load_config

    config = load_config(source, overrides)
    with services(("s3",)):
        from infra.store.buffer import SampleBuffer
        from infra.store.objects import ObjectStore

        return list(SampleBuffer(ObjectStore.connect(config.store), config.prefix).history(NEWEST))


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table("plan", "step s", "tokens/s", "trainer idle", "engines idle", "lag", "million trajectories")
    for row in found[:SHOWN]:
        table.add_row(
            row["plan"],
            f"{row['step_s']:.0f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['trainer_idle']:.0%}",
            f"{row['engine_idle']:.0%}",
            f"{row['lag']:.2f}",
            f"{row['cost']:.0f} H20 h",
        )
    return table
