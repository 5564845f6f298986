"""The command line: `rollmill --help`.

Invariants: an error that has a name is one line on stderr and exit code 2; heavy libraries are imported by the
command that needs them, after the environment is set, for Prefect reads its settings on import.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rl.errors import RollmillError

app = typer.Typer(
    help="Agentic reinforcement learning for language models, from a laptop to a mixed cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console()

ConfigArgument = Annotated[str, typer.Argument(help="A YAML file, or the name of a preset (see `rollmill presets`).")]
SetOption = Annotated[
    list[str], typer.Option("--set", help="Override one field, such as training.steps=10. Repeatable.")
]
PortOption = Annotated[int | None, typer.Option(help="Its port, instead of the usual one.")]


def one_line_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Named errors end a command with one line, not a traceback."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except RollmillError as error:
            typer.secho(f"error: {error}", fg="red", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.secho("interrupted; go on with --resume", err=True)
            raise typer.Exit(130) from None

    return wrapped


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
        from flows.train import train

        quiet_failures()
        show(console, directory, train(name, config, console=console))


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
            f"{settled.training.group_size}, alpha {policy.alpha}, at most {policy.buffer_groups} groups unsettled.",
            highlight=False,
        )
        return
    with services():
        from flows.quiet import quiet_failures
        from flows.train import train as train_flow

        quiet_failures()
        report = train_flow(settled.name, settled, resume=resume, console=console)
        console.print(report.table, highlight=False, soft_wrap=True)
        console.print(f"report: {report.json_path}  plots: {report.reward_png}, {report.timeline_png}", highlight=False)


@app.command()
@one_line_errors
def evaluate(config: ConfigArgument, overrides: SetOption = []) -> None:  # noqa: B006
    """Evaluate the newest version of a run on its held-out problems."""
    from flows.configure import load_config

    settled = load_config(config, overrides)
    with services():
        from flows.evaluate import evaluate_newest
        from flows.quiet import quiet_failures

        quiet_failures()
        evaluate_newest(settled.name, settled, console)


@app.command()
@one_line_errors
def versions(config: ConfigArgument, overrides: SetOption = []) -> None:  # noqa: B006
    """The policy versions of a run: what each was trained on, and with what result."""
    from flows.configure import load_config

    settled = load_config(config, overrides)
    with services(("s3",)):
        from flows.prepare import reach
        from flows.report import records_of
        from infra.tracking.plots import versions_table

        console.print(versions_table(records_of(settled, reach(settled))), highlight=False, soft_wrap=True)


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
            "[green]ok[/green]" if check.ok else "[red]no[/red]",
            check.name,
            check.detail,
            "" if check.ok else check.mend,
        )
    console.print(table)
    if not all(check.ok for check in results):
        raise typer.Exit(1)


@contextmanager
def services(which: tuple[str, ...] = ("s3", "prefect", "mlflow")) -> Iterator[None]:
    """The services for the duration of a command. Those that the environment names (AWS_ENDPOINT_URL_S3 or
    AWS credentials, PREFECT_API_URL, MLFLOW_TRACKING_URI) are used as they are; the others are the embedded
    ones, started if they are not up (on free ports where the usual ones are taken), and stopped again if this
    command started them."""
    from flows.quiet import flush_logs
    from infra.services.endpoints import environment
    from infra.services.errors import PortInUse
    from infra.services.supervisor import AUTO, status, up
    from infra.services.supervisor import down as stop

    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("TQDM_DISABLE", "1")
    given = {"s3": "AWS_ACCESS_KEY_ID", "prefect": "PREFECT_API_URL", "mlflow": "MLFLOW_TRACKING_URI"}
    wanted = [name for name in which if given[name] not in os.environ]
    running = {s.name for s in status() if s.state == "running"}
    started = [name for name in wanted if name not in running]
    if wanted:
        if started:
            console.print(f"starting {', '.join(started)}", highlight=False)
        try:
            found = up(which=wanted)
        except PortInUse as error:
            console.print(f"{error.message}: taking free ports", highlight=False, soft_wrap=True)
            found = up(ports=AUTO, which=wanted)
        _end_well_on_signals()
        os.environ.update(
            {k: v for k, v in environment(found).items() if k not in os.environ or k.lower() == "no_proxy"}
        )
    try:
        yield
    finally:
        if started:
            flush_logs()
            stop(which=started)


def _end_well_on_signals() -> None:
    """A closed terminal or a plain kill ends the command through its `finally` blocks, too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
