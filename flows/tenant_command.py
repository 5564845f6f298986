"""`rollmill tenants`: a service for many tenants, and the jobs in it.

Invariant: every command but `serve` only reads and writes the store, so it works beside the service and without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
        from flows.told import run_flow

        quiet_failures()
        run_flow(serve_flow, settled.name, settled, until_idle=until_idle, console=console)


@app.command()
@one_line_errors
def submit(
    service: ServiceArgument,
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A YAML file; see docs/tenants.md.")],
    overrides: SetOption = [],  # noqa: B006
    fields: Annotated[list[str], typer.Option("--job", help="Override one field of the job. Repeatable.")] = [],  # noqa: B006
) -> None:
    """Hand a job in. It waits for a place, then it runs."""
    from flows.tenant_service import load_job

    with tenants_of(service, overrides) as tenants:
        entry = tenants.submit(load_job(str(job), fields))
        console.print(f"{entry.job.id} is {entry.state}", highlight=False)


@app.command("list")
@one_line_errors
def list_(
    service: ServiceArgument,
    overrides: SetOption = [],  # noqa: B006
    json: Annotated[bool, typer.Option("--json", help="All figures, as JSON.")] = False,
) -> None:
    """The jobs: how far they are, and what each got and gave."""
    with tenants_of(service, overrides) as tenants:
        from flows.tenant_service import as_json

        rows = tenants.figures()
        if json:
            typer.echo(as_json(rows))
        else:
            console.print(tenants.table(rows), highlight=False, soft_wrap=True, markup=False)
            for kind, share in tenants.utilisation().items():
                console.print(f"{kind} busy {share:.0%}, idle {1 - share:.0%}", highlight=False)


@app.command()
@one_line_errors
def watch(service: ServiceArgument, overrides: SetOption = []) -> None:  # noqa: B006
    """The same, as it changes, until interrupted."""
    with (
        tenants_of(service, overrides) as tenants,
        suppress(KeyboardInterrupt),  # which is how one ends it; the last table stays
        Live(console=console, auto_refresh=False) as live,
    ):
        while True:
            live.update(tenants.table(), refresh=True)
            sleep(WATCH_S)


@app.command()
@one_line_errors
def config(
    service: ServiceArgument,
    job: JobArgument,
    overrides: SetOption = [],  # noqa: B006
    to: Annotated[Path | None, typer.Option(help="A file to write it to.")] = None,
) -> None:
    """A job as the configuration of a run, for `rollmill versions`, `samples`, `audit`, `evaluate` and so on."""
    with tenants_of(service, overrides) as tenants:
        from flows.tenant_service import as_yaml, write_config

        found = tenants.config(job)
        if to is None:
            typer.echo(as_yaml(found))
        else:
            write_config(found, to)


@app.command()
@one_line_errors
def report(
    service: ServiceArgument,
    job: JobArgument,
    to: Annotated[Path, typer.Option(help="A directory for its files.")],
    overrides: SetOption = [],  # noqa: B006
) -> None:
    """What a job learned so far: reward curve, timeline, figures. The service makes one when a job is over."""
    with tenants_of(service, overrides) as tenants:
        made = tenants.report(job, to)
        console.print(made.table, highlight=False, soft_wrap=True, markup=False)
        console.print(f"report: {', '.join(map(str, made.files))}", highlight=False, soft_wrap=True)


@app.command()
@one_line_errors
def pause(service: ServiceArgument, job: JobArgument, overrides: SetOption = []) -> None:  # noqa: B006
    """Let a job rest: what it has in flight ends, and is drawn again when it goes on."""
    _order(service, job, "pause", overrides)


@app.command()
@one_line_errors
def resume(service: ServiceArgument, job: JobArgument, overrides: SetOption = []) -> None:  # noqa: B006
    """Let a job that was paused, or failed, go on from its newest commit."""
    _order(service, job, "resume", overrides)


@app.command()
@one_line_errors
def cancel(service: ServiceArgument, job: JobArgument, overrides: SetOption = []) -> None:  # noqa: B006
    """End a job for good. What it made stays."""
    _order(service, job, "cancel", overrides)


@app.command()
@one_line_errors
def delete(service: ServiceArgument, job: JobArgument, overrides: SetOption = []) -> None:  # noqa: B006
    """Delete what a job that is over made, but for its log. The service does it."""
    _order(service, job, "delete", overrides)


@app.command()
@one_line_errors
def credentials(
    service: ServiceArgument,
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose.")],
    overrides: SetOption = [],  # noqa: B006
    policy: Annotated[bool, typer.Option("--policy", help="The policy for AWS instead.")] = False,
) -> None:
    """Keys of the embedded store that read what is TENANT's and nothing else, as lines for a shell."""
    import json

    with tenants_of(service, overrides) as tenants:
        from infra.services.grants import grant, tenant_policy

        found = tenants.service
        if policy:
            typer.echo(json.dumps(tenant_policy(found.store.bucket, tenant, found.name), indent=2))
            return
        own = grant(tenant, found.name)
        typer.echo(
            f"export AWS_ACCESS_KEY_ID={own.access_key}\nexport AWS_SECRET_ACCESS_KEY={own.secret_key}\n"
            f"export AWS_ENDPOINT_URL_S3={own.endpoint_url}"
        )


def _order(service: str, job: str, order: Order, overrides: list[str]) -> None:
    with tenants_of(service, overrides) as tenants:
        console.print(f"{job} is {tenants.order(job, order).state}", highlight=False)


@contextmanager
def tenants_of(service: str, overrides: list[str]) -> Iterator[Tenants]:
    """The service as its store tells it."""
    from flows.tenant_service import Tenants, load_service

    given = load_service(service, overrides)
    with services(("s3",)):
        from flows.prepare import reach
        from flows.tenants import find_service

        yield Tenants(find_service(reach(given.host), given.name))
