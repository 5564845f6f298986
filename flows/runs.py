"""`rollmill runs`: what runs there are, how they do, what they say, and ending one.

Invariants: everything but `stop` only reads; what a run is and how far it came is read from the store, so that it is
told of a run on any machine, with or without Prefect.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.command import console, one_line_errors, services
from rl.errors import ConfigError, DeadlineExceeded, LogTooNew

if TYPE_CHECKING:
    from infra.store.objects import ObjectStore
    from rl.config.run import RunConfig
    from rl.records import Record, Step

app = typer.Typer(help="The runs of a bucket.", no_args_is_help=True)

RunArgument = Annotated[str, typer.Argument(help="Its name, or tenant/name.")]
BucketOption = Annotated[str, typer.Option(help="The bucket that holds the runs.")]
STOP_S = 180.0
NEWEST = 10


@dataclass(frozen=True)
class Seen:
    """One run, as its store tells it."""

    config: RunConfig
    records: list[Record]

    @property
    def name(self) -> str:
        return self.config.prefix.rstrip("/")

    @property
    def steps(self) -> list[Step]:
        """The trained versions of the live line, in order."""
        from rl.rollback import live_line

        return [step for step in live_line([], self.records) if step.base is not None]

    @property
    def head(self) -> str:
        from rl.records import Step

        steps = self.steps
        committed = any(isinstance(r, Step) for r in self.records)
        return str(steps[-1].version) if steps else "0" if committed else "-"


@app.command("ls")
@one_line_errors
def ls(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None, bucket: BucketOption = "rollmill"
) -> None:
    """The runs: how far each came, with what reward, when it last committed, and whether a flow run trains it now."""
    with _store(bucket) as store:
        from infra.store.runs import run_prefixes
        from infra.tracking.text import text_table

        live = _live()
        rows, unreadable = [], []
        for prefix in run_prefixes(store, tenant):
            try:
                run = _seen(store, prefix)
            except (ConfigError, LogTooNew) as error:
                rows.append([prefix.rstrip("/"), *["?"] * 5])
                unreadable.append(str(error))
                continue
            rewards = [s.metrics["reward"] for s in run.steps if "reward" in s.metrics]
            rows.append(
                [
                    run.name,
                    f"{run.head}/{run.config.training.steps}",
                    f"{rewards[-1]:.3f}" if rewards else "-",
                    _ago(run.records[-1].time) if run.records else "-",
                    live.get(_tag(run.config), "-"),
                    ", ".join(alert.kind.replace("_", " ") for alert in _alerts(run, store)) or "-",
                ]
            )
        head = ["run", "version", "reward", "last record", "flow run", "alerts"]
        print_table = text_table(head, rows, left={"run", "flow run", "alerts"}) if rows else f"no run in {bucket!r}"
        console.print("\n".join([print_table, *unreadable]), highlight=False, soft_wrap=True, markup=False)


@app.command()
@one_line_errors
def status(run: RunArgument, bucket: BucketOption = "rollmill") -> None:
    """How a run does: its newest steps, its evaluations, its alerts, what it was dropped for."""
    prefix = _prefix(run)
    with _store(bucket) as store:
        from flows.evaluations import load_all
        from infra.tracking.plots import versions_table

        seen = _seen(store, prefix)
        lines = [
            f"{seen.name}: version {seen.head} of {seen.config.training.steps}, {seen.config.staleness.mode} with "
            f"alpha {seen.config.staleness.alpha}, {len(seen.config.domains)} domains",
            f"flow run: {_live().get(_tag(seen.config), 'none that trains it')}",
        ]
        if seen.records:
            lines += [
                f"last record: {_ago(seen.records[-1].time)}",
                "",
                versions_table(seen.records[-NEWEST:]),
                "",
                *(str(evaluation) for evaluation in load_all(seen.config, store)[-2 * len(seen.config.domains) :]),
            ]
        found = _alerts(seen, store)
        lines += [f"alert: {alert}" for alert in found] or ["no alerts"]
        console.print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)


@app.command()
@one_line_errors
def logs(
    run: RunArgument,
    part: Annotated[str | None, typer.Option(help="Only this one's: trainer, rollout, learn, ...")] = None,
    lines: Annotated[int, typer.Option(min=1, help="So many last lines of each.")] = 30,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they grow, until Ctrl-C.")] = False,
) -> None:
    """What the parts of a run on this machine wrote; the train flow's own log is in Prefect."""
    from flows.home import Home

    tenant, name = _prefix(run).rstrip("/").split("/")
    directory = Home.default().of(tenant, name)
    found = sorted(p for p in directory.rglob("logs/*.log") if part is None or p.stem == part)
    if not found:
        there = ", ".join(sorted({p.stem for p in directory.rglob("logs/*.log")})) or "none"
        raise ConfigError(f"no log {part or ''} of run {run!r} in {directory}; there are: {there}")
    ends = {}
    for path in found:
        text = path.read_text(errors="replace")
        ends[path] = path.stat().st_size
        console.print(f"[bold]{path}[/bold]", highlight=False, soft_wrap=True)
        console.print("\n".join(text.splitlines()[-lines:]), highlight=False, soft_wrap=True, markup=False)
    while follow:
        time.sleep(0.5)
        for path in found:
            ends[path] = _print_from(path, ends[path])


@app.command()
@one_line_errors
def stop(
    run: RunArgument,
    wait: Annotated[float, typer.Option(help="Seconds to wait for its end.")] = STOP_S,
) -> None:
    """End the flow run that holds a run, as "Cancel" in Prefect's UI does. `rollmill train --resume` goes on."""
    tag = f"run:{_prefix(run).rstrip('/').replace('/', '.')}"
    with services(("prefect",)):
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.objects import TERMINAL_STATES
        from prefect.states import Cancelling

        from flows.flow_runs import LEASE, crash_the_gone, flow_runs

        with get_client(sync_client=True) as client:
            crash_the_gone(client, tag)
            found = [r for r in flow_runs(client, tag) if LEASE in r.labels]
            mine = [r for r in found if r.state_type is not None and r.state_type not in TERMINAL_STATES]
            if not mine:
                raise ConfigError(f"no flow run trains {run!r}; see `rollmill runs ls`")
            for flow_run in mine:
                client.set_flow_run_state(flow_run.id, Cancelling(message="`rollmill runs stop`"))
            end = time.monotonic() + wait
            for flow_run in mine:
                while not ((state := client.read_flow_run(flow_run.id).state) and state.is_final()):
                    crash_the_gone(client, tag)
                    if time.monotonic() > end:
                        raise DeadlineExceeded(f"flow run {flow_run.name!r} did not end within --wait ({wait:g} s)")
                    time.sleep(0.5)
                console.print(f"{flow_run.name}: {state.name}; go on with --resume", highlight=False)


@app.command()
@one_line_errors
def compare(
    runs: Annotated[list[str], typer.Argument(help="Two or more, each by name or tenant/name.")],
    plot: Annotated[Path | None, typer.Option(help="Their reward curves as a PNG, too.")] = None,
    bucket: BucketOption = "rollmill",
) -> None:
    """Runs side by side: figures, in which fields their configurations differ, and their reward curves."""
    if len(runs) < 2:
        raise ConfigError(f"RUNS is {runs[0]!r} alone; name two or more")
    prefixes = [_prefix(run) for run in runs]
    if plot is not None and not plot.parent.is_dir():
        raise ConfigError(f"--plot {str(plot)!r}: there is no directory {str(plot.parent)!r}; make it, or name another")
    with _store(bucket) as store:
        from flows.comparison import comparison, plot_rewards

        seen = [_seen(store, prefix) for prefix in prefixes]
        console.print(comparison(seen, store), highlight=False, soft_wrap=True, markup=False)
        if plot is not None:
            plot_rewards({run.name: run.steps for run in seen}, plot)
            console.print(f"plot: {plot}", highlight=False, soft_wrap=True)


@contextmanager
def _store(bucket: str) -> Iterator[ObjectStore]:
    with services(("s3",)):
        from infra.store.objects import ObjectStore
        from rl.config.infrastructure import StoreSection

        store = ObjectStore.connect(StoreSection(bucket=bucket))
        store.ensure_bucket(create=False)
        yield store


def _seen(store: ObjectStore, prefix: str) -> Seen:
    from flows.prepare import stored_config
    from infra.store.reader import LogReader

    return Seen(stored_config(store, prefix), LogReader(store, prefix).history())


def _prefix(run: str) -> str:
    """Its key prefix. Raises ConfigError for what can be the name of none."""
    from rl.config.base import NAME

    tenant, separator, name = run.partition("/")
    if not separator:
        tenant, name = "default", run
    if not (re.fullmatch(NAME, tenant) and re.fullmatch(NAME, name)):
        raise ConfigError(f"RUN {run!r} is no name of a run; give `name` or `tenant/name`, as `rollmill runs ls` does")
    return f"{tenant}/{name}/"


def _tag(config: RunConfig) -> str:
    return f"run:{config.tenant}.{config.name}"


def _live() -> dict[str, str]:
    """What flow runs train runs now, by the run's tag; nothing where Prefect is not up."""
    import os

    from infra.services.supervisor import endpoints

    address = os.environ.get("PREFECT_API_URL") or endpoints().prefect_api_url
    if address is None:
        return {}
    os.environ["PREFECT_API_URL"] = address
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import StateType

    from flows.flow_runs import LEASE, crash_the_gone, flow_runs

    try:
        with get_client(sync_client=True) as client:
            crash_the_gone(client, "rollmill")
            return {
                tag: f"{r.name} ({r.state_name})"
                for r in flow_runs(client, "rollmill")
                for tag in r.tags
                if tag.startswith("run:") and LEASE in r.labels and r.state_type is StateType.RUNNING
            }
    except httpx.HTTPError:
        return {}


def _alerts(run: Seen, store: ObjectStore) -> list:
    from flows.alarms import alerts_of
    from flows.evaluations import load_all

    return alerts_of(run.config, run.steps, load_all(run.config, store))


def _ago(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _print_from(path: Path, start: int) -> int:
    """What was written behind `start`, and where it ends now."""
    with path.open("rb") as file:
        file.seek(start)
        if more := file.read():
            console.print(more.decode(errors="replace"), end="", highlight=False, soft_wrap=True, markup=False)
        return file.tell()
