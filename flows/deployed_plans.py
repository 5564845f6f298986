"""The simulate flow, as `rollmill simulate` and the deployment `simulate` run it: a plan of a cluster.

Invariants: what it says is in the log, in the artifact `plan-{name}` and in the files of one directory on the machine
that ran it; a mistake in a plan fails at once, for another try would meet it again.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact

from flows.forms import SimulateForm
from flows.plans import PICTURES, best_plan, make_plan, plan_table, with_measured
from sim.plan import PlanFile, load_plan


@flow(name="simulate", flow_run_name="simulate {plan.title}")
def simulate(plan: SimulateForm) -> list[dict[str, Any]]:
    """Plan a cluster: throughput, bubbles, cost, the best staleness bound, spares and mix of GPUs. The plans that were
    tried, best first."""
    loaded = load_plan(plan.plan)
    if plan.from_run is not None:
        loaded, said = with_measured(loaded, plan.from_run.config())
        get_run_logger().info("%s", said)
    return _planned(loaded, Path(plan.directory))


@flow(name="simulate", flow_run_name="simulate {name}", validate_parameters=False)
def simulate_loaded(name: str, loaded: PlanFile, directory: Path) -> list[dict[str, Any]]:
    """The same of a plan in hand."""
    return _planned(loaded, directory)


def _planned(loaded: PlanFile, directory: Path) -> list[dict[str, Any]]:
    found = make_plan(loaded, directory)
    log = get_run_logger()
    for line in (*plan_table(found).splitlines(), best_plan(found)):
        log.info("%s", line)
    key = f"plan-{loaded.scenario.name}".lower().replace("_", "-").replace(".", "-")
    create_markdown_artifact(key=key, markdown=_page(found, directory), description=best_plan(found))
    return found


def _page(found: list[dict[str, Any]], directory: Path) -> str:
    pictures = "\n\n".join(
        f"![{name}](data:image/png;base64,{base64.b64encode((directory / name).read_bytes()).decode()})"
        for name in PICTURES
    )
    return f"{best_plan(found)}\n\n```\n{plan_table(found)}\n```\n\n{pictures}\n"
