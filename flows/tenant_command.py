"""`rollmill tenants`: a service for many tenants, and the jobs in it.

Invariant: every command but `serve` only reads and writes the store, so it works beside the service and without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live

from flows.command import SetOption, console, one_line_errors, services

if TYPE_CHECKING:
    from flows.tenant_service import Tenants
    from rl.jobs import Order

app = typer.Typer(help="Many tenants on one base: a service, and the jobs in it.", no_args_is_help=True)

ServiceArgument = Annotated[str, typer.Argument(metavar="SERVICE", help="A YAML file, or the name of a preset.")]
JobArgument = Annotated[str, typer.Argument(metavar="TENANT/JOB", help="Which job.")]
WATCH_S = 2.0


@app.command()
@one_line_errors
def serve(
    service: ServiceArgument,
    overrides: SetOption = [],  # noqa: B006
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when all jobs are over, once there was one.")
    ] = False,
) -> None:
    """Serve the jobs of SERVICE until stopped. Killed, it goes on with them when it is started again."""
    from flows.tenant_service import load_service

    settled = load_service(service, overrides)
    with services():
        from flows.quiet import quiet_failures
        from flows.tenants import serve as serve_flow

        quiet_failures()
        serve_flow(settled.name, settled, until_idle=until_idle, console=console)


@app.command()
@one_line_errors
def submit(
    service: ServiceArgument,
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A YAML file; see docs/tenants.md.")],
    overrides: SetOption = [],  # noqa: B006
) -> None:
    """Hand a job in. It waits for a place, then it runs."""
    from flows.tenant_service import load_job

    with tenants_of(service) as tenants:
        entry = tenants.submit(load_job(str(job), overrides))
        console.print(f"{entry.job.id} is {entry.state}", highlight=False)


@app.command("list")
@one_line_errors
def list_(
    service: ServiceArgument,
    json: Annotated[bool, typer.Option("--json", help="All figures, as JSON.")] = False,
) -> None:
    """The jobs: how far they are, and what each got and gave."""
    with tenants_of(service) as tenants:
        from flows.tenant_service import as_json

        rows = tenants.figures()
        if json:
            typer.echo(as_json(rows))
        else:
            console.print(tenants.table(rows), highlight=False, soft_wrap=True, markup=False)


@app.command()
@one_line_errors
def watch(service: ServiceArgument) -> None:
    """The same, as it changes, until interrupted."""
    with tenants_of(service) as tenants, Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(tenants.table(), refresh=True)
            sleep(WATCH_S)


@app.command()
@one_line_errors
def config(
    service: ServiceArgument,
    job: JobArgument,
    to: Annotated[Path | None, typer.Option(help="A file to write it to.")] = None,
) -> None:
    """A job as the configuration of a run, for `rollmill versions`, `samples`, `audit`, `evaluate` and so on."""
    with tenants_of(service) as tenants:
        from flows.tenant_service import as_yaml, write_config

        found = tenants.config(job)
        if to is None:
            typer.echo(as_yaml(found))
        else:
            write_config(found, to)


@app.command()
@one_line_errors
def pause(service: ServiceArgument, job: JobArgument) -> None:
    """Let a job rest: what it has in flight ends, and is drawn again when it goes on."""
    _order(service, job, "pause")


@app.command()
@one_line_errors
def resume(service: ServiceArgument, job: JobArgument) -> None:
    """Let a job that was paused, or failed, go on from its newest commit."""
    _order(service, job, "resume")


@app.command()
@one_line_errors
def cancel(service: ServiceArgument, job: JobArgument) -> None:
    """End a job for good. What it made stays."""
    _order(service, job, "cancel")


@app.command()
@one_line_errors
def delete(service: ServiceArgument, job: JobArgument) -> None:
    """Delete what a job that is over made, but for its log. The service does it."""
    _order(service, job, "delete")


def _order(service: str, job: str, order: Order) -> None:
    with tenants_of(service) as tenants:
        console.print(f"{job} is {tenants.order(job, order).state}", highlight=False)


@contextmanager
def tenants_of(service: str) -> Iterator[Tenants]:
    """The service as its store tells it."""
    from flows.tenant_service import Tenants, load_service

    given = load_service(service)
    with services(("s3",)):
        from flows.prepare import reach
        from flows.tenants import find_service

        yield Tenants(find_service(reach(given.host), given.name))
