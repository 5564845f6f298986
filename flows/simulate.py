"""The command `rollmill simulate`: plan a cluster before there is one.

Invariants: nothing is started but what the command needs to read a run that is named (`--from-run`, which `--set` is
for); the result is a table, one JSON file and pictures; with PREFECT_API_URL set it is a flow run there, else a plain
function.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from flows.command import SetOption, one_line_errors

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
        from flows.command import services
        from flows.configure import load_config
        from flows.plans import with_measured

        with services(("s3",)):
            loaded, said = with_measured(loaded, load_config(from_run, overrides))
        typer.echo(said)
    from flows.plans import PICTURES, best_plan, make_plan, plan_table

    if "PREFECT_API_URL" in os.environ:
        from flows.deployed_plans import simulate_loaded

        found = simulate_loaded(loaded.scenario.name, loaded, directory)
    else:
        found = make_plan(loaded, directory)
    typer.echo(plan_table(found))
    typer.echo(best_plan(found))
    plots = ", ".join(str(directory / name) for name in PICTURES)
    typer.echo(f"report: {directory / 'plan.json'}  plots: {plots}")
