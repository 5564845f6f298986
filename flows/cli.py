"""The command line: `rollmill --help`.

Invariants: an error that has a name is one line on stderr and exit code 2; heavy libraries are imported by the
command that needs them, after the environment is set, for Prefect reads its settings on import.
"""

from __future__ import annotations

import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from flows import (
    audit,
    engines,
    environments,
    export,
    profile,
    project,
    rewards,
    runs,
    samples,
    serve,
    simulate,
    tenant_command,
    versions,
)
from flows.command import ConfigArgument, SetOption, console, one_line_errors, services

app = typer.Typer(
    help="Agentic reinforcement learning for language models, from a laptop to a mixed cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

PortOption = Annotated[int | None, typer.Option(help="Its port, instead of the usual one.")]


@app.command()
@one_line_errors
def demo(
    directory: Annotated[Path, typer.Option(help="Where everything goes: services' data, run, report.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Of the run.")] = 0,
    overrides: SetOption = [],  # noqa: B006  typer copies it
) -> None:
    """Train a tiny agent from nothing in a few minutes and show the result."""
    os.environ["ROLLMILL_HOME"] = str(directory.resolve())
    from flows.configure import load_config

    name = f"demo-{datetime.now():%Y%m%d-%H%M%S}"  # fresh, so that a second demo does not meet the first one's run
    config = load_config("calculator", [f"name={name}", f"seed={seed}", *overrides])
    with services():
        from flows.demo import show
        from flows.quiet import quiet_failures
        from flows.told import run_flow
        from flows.train import train

        quiet_failures()
        show(console, directory, run_flow(train, name, config, console=console))


@app.command()
@one_line_errors
def train(
    config: ConfigArgument,
    overrides: SetOption = [],  # noqa: B006
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that exists.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything that can be checked without starting.")
    ] = False,
) -> None:
    """Train a run to its last step; interrupted or killed, it goes on with --resume."""
    from flows.configure import cross_check, load_config

    settled = load_config(config, overrides)
    cross_check(settled)
    if dry_run:
        policy = settled.policy
        console.print(
            f"{settled.tenant}/{settled.name}: fine. {settled.training.steps} steps of "
            f"{policy.groups_per_step} groups of "
            f"{settled.training.group_size}, {settled.staleness.mode} with alpha {policy.admission}, at most "
            f"{policy.buffer_groups} groups unsettled.",
            highlight=False,
        )
        return
    with services():
        from flows.quiet import quiet_failures
        from flows.told import run_flow
        from flows.train import train as train_flow

        quiet_failures()
        report = run_flow(train_flow, settled.name, settled, resume=resume, console=console)
        console.print(report.table, highlight=False, soft_wrap=True)
        console.print(f"report: {report.json_path}  plots: {report.reward_png}, {report.timeline_png}", highlight=False)


@app.command()
@one_line_errors
def evaluate(
    config: ConfigArgument,
    version: Annotated[
        int | None, typer.Option(help="Which one (`rollmill versions list`).", show_default="the newest")
    ] = None,
    overrides: SetOption = [],  # noqa: B006
) -> None:
    """Evaluate a version of a run on its held-out problems."""
    from flows.configure import load_config

    settled = load_config(config, overrides)
    with services():
        from flows.evaluate import evaluate_version
        from flows.quiet import quiet_failures
        from flows.told import run_flow

        quiet_failures()
        run_flow(evaluate_version, settled.name, settled, console, version)


@app.command()
@one_line_errors
def presets() -> None:
    """The configurations that ship."""
    from flows.configure import PRESETS, preset_names

    for name in preset_names():
        first = (PRESETS / f"{name}.yaml").read_text().splitlines()[0].removeprefix("# ")
        console.print(f"[bold]{name}[/bold]  {first}", highlight=False)


@app.command()
@one_line_errors
def up(s3_port: PortOption = None, prefect_port: PortOption = None, mlflow_port: PortOption = None) -> None:
    """Start the embedded services (S3, Prefect, MLflow) on loopback; they stay until `rollmill down`."""
    from infra.services.supervisor import Ports
    from infra.services.supervisor import up as start

    found = start(ports=Ports(s3_port, prefect_port, mlflow_port))
    console.print(
        f"Prefect UI  {found.prefect_ui_url}\nMLflow UI   {found.mlflow_uri}\n"
        f"S3          {found.need_s3().endpoint_url}\ndata        {found.data_dir}",
        highlight=False,
    )


@app.command()
@one_line_errors
def down() -> None:
    """Stop the embedded services; their data stay."""
    from infra.services.supervisor import down as stop

    ended = stop()
    console.print(f"stopped: {', '.join(ended) or 'nothing was running'}", highlight=False)


@app.command()
@one_line_errors
def doctor() -> None:
    """Check this machine and every service, with the mend for whatever fails."""
    from infra.services.doctor import checks

    table = Table("", "check", "found", "mend")
    results = checks()
    for check in results:
        table.add_row(
            "[green]ok[/green]" if check.ok else "[yellow]--[/yellow]" if check.optional else "[red]no[/red]",
            check.name,
            check.detail,
            "" if check.ok else check.mend,
        )
    console.print(table)
    if not all(check.ok or check.optional for check in results):
        raise typer.Exit(1)


app.command("serve")(serve.serve)
app.add_typer(environments.app, name="env")
app.add_typer(engines.app, name="engine")
app.add_typer(versions.app, name="versions")
app.add_typer(runs.app, name="runs")
app.add_typer(samples.app, name="samples")
app.add_typer(rewards.app, name="rewards")
app.add_typer(tenant_command.app, name="tenants")
app.command("gc")(versions.collect)
app.command("export")(export.export)
app.command("init")(project.init)
app.command("profile")(profile.profile)
app.command("audit")(audit.audit)
app.command("simulate")(simulate.simulate)


def main() -> None:
    try:
        app()
    except SystemExit as end:
        if "prefect" not in sys.modules:
            raise
        from flows.told import leave

        leave(end.code)


if __name__ == "__main__":
    main()
