"""`rollmill serve`: the deployments on Prefect's server, and a worker that runs them.

Invariant: whatever ends the command ends what it started, and leaves runs that can be resumed.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from flows.command import console, one_line_errors, services

FLOW_LOGS = "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL"
"""Of the flows' own lines, which the UI shows; those of task runs stay out."""


@one_line_errors
def serve(
    limit: Annotated[int, typer.Option(min=1, help="Flow runs at once on this machine.")] = 2,
    schedules: Annotated[
        bool | None,
        typer.Option("--schedules/--no-schedules", help="Switch all schedules on or off; else they stay as they are."),
    ] = None,
) -> None:
    """Offer the flows in Prefect's UI (train, evaluate, warmstart, gc, simulate, tenants and their jobs), and run
    what is started there."""
    from flows.home import Home

    os.environ["ROLLMILL_HOME"] = str(Home.default().root)  # a flow run starts in a directory of its own
    os.environ.setdefault(FLOW_LOGS, "INFO")
    with services():
        os.environ.setdefault("PREFECT_WORKER_QUERY_SECONDS", "5")
        from flows.deployments import deploy, work

        for name in deploy(schedules):
            console.print(f"  {name}", highlight=False)
        console.print(
            f"Prefect UI  {os.environ['PREFECT_API_URL'].removesuffix('/api')}/deployments\n"
            f"up to {limit} flow runs at once on this machine; end it with Ctrl-C",
            highlight=False,
        )
        work(limit)
