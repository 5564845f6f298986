"""`rollmill versions` and `rollmill gc`: what versions a run has, which stay and why, and taking one out.

Invariants: an operator's command needs no fence and runs beside a live trainer, but for `rollback`, which takes the run
over; what may not be done the log refuses, with its reason.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from flows.command import ConfigArgument, SetOption, console, one_line_errors, services
from rl.errors import ConfigError

if TYPE_CHECKING:
    from infra.store.gc import Collector, StoredState, Survey
    from infra.store.log import CommitLog
    from rl.config.run import RunConfig
    from rl.records import Record, Step

app = typer.Typer(help="The policy versions of a run.", no_args_is_help=True)

VersionArgument = Annotated[str, typer.Argument(help="Its number, or `head`.")]


@dataclass(frozen=True)
class Run:
    """A run as an operator's command sees it."""

    config: RunConfig
    log: CommitLog
    records: list[Record]

    @property
    def name(self) -> str:
        return self.config.prefix.rstrip("/")

    @property
    def collector(self) -> Collector:
        from flows.evaluations import pending
        from infra.store.gc import Collector

        awaited = partial(pending, self.config, self.log.store)
        return Collector(self.log, self.config.prefix, self.config.keeps, self.config.retention.grace, awaited)

    def step(self, version: str) -> Step:
        """The record of a version that a user named."""
        from rl.records import Step

        steps = {record.version: record for record in self.records if isinstance(record, Step)}
        number = str(self.log.ledger.head) if version == "head" else version
        if not number.isdecimal() or int(number) not in steps:
            raise ConfigError(f"VERSION {version!r} is not in run {self.name!r}; it has 0 to {max(steps)}, and `head`")
        return steps[int(number)]


@app.command("list")
@one_line_errors
def list_(config: ConfigArgument, overrides: SetOption = []) -> None:  # noqa: B006
    """The versions: what each was trained on and with what result, whether its state is there, and why it stays."""
    with run_of(config, overrides) as run:
        from infra.tracking.plots import versions_table

        found = run.collector.survey()
        columns = {"state": _states(found), "age": _ages(found), "kept": _kept(run, found)}
        console.print(versions_table(run.records, columns), highlight=False, soft_wrap=True, markup=False)


@app.command()
@one_line_errors
def show(config: ConfigArgument, version: VersionArgument, overrides: SetOption = []) -> None:  # noqa: B006
    """Everything about one version: its record, its samples, its files."""
    with run_of(config, overrides) as run:
        from infra.store.directories import read_manifest
        from infra.store.errors import NotFound

        step = run.step(version)
        lines = [
            f"version {step.version} of {run.name}, record {step.lsn} by {step.writer}, on "
            + ("nothing" if step.base is None else f"version {step.base}"),
            f"kept: {_kept(run, run.collector.survey()).get(step.version, '-')}",
            f"weights sha256 {step.weights_sha256}",
            f"trained: {' '.join(step.trained) or '-'}",
            f"dropped: {' '.join(f'{drop.uid} ({drop.reason})' for drop in step.dropped) or '-'}",
            *(f"{name}: {value:.6g}" for name, value in sorted(step.metrics.items()) if not name.startswith("span_")),
        ]
        try:
            _, manifest = read_manifest(
                run.log.store, run.config.prefix + step.state.prefix, step.state.manifest_sha256
            )
            files = [f"  {name}  {_size(entry.size)}" for name, entry in sorted(manifest.files.items())]
        except NotFound:
            files = ["  deleted"]
        lines += [f"{'full' if step.state.full else 'weights-only'} state in {step.state.prefix}", *files]
        console.print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)


@app.command()
@one_line_errors
def pin(config: ConfigArgument, version: VersionArgument, overrides: SetOption = []) -> None:  # noqa: B006
    """Keep a version's state, whatever the retention policy says."""
    _mark(config, overrides, version, "pin", "pinned: its state stays until it is unpinned")


@app.command()
@one_line_errors
def unpin(config: ConfigArgument, version: VersionArgument, overrides: SetOption = []) -> None:  # noqa: B006
    """Leave a pinned version to the retention policy again."""
    _mark(config, overrides, version, "unpin", "no longer pinned")


@app.command()
@one_line_errors
def delete(config: ConfigArgument, version: VersionArgument, overrides: SetOption = []) -> None:  # noqa: B006
    """Let a version's state go. The next collection after the grace period deletes it; its number stays used."""
    _mark(config, overrides, version, "delete", "marked: a collection deletes its state once the grace period is over")


@app.command()
@one_line_errors
def rollback(config: ConfigArgument, version: VersionArgument, overrides: SetOption = []) -> None:  # noqa: B006
    """Make an earlier version the head again; the samples trained since are drawn anew. Ends a trainer that runs;
    `rollmill train --resume` goes on from there."""
    with run_of(config, overrides) as run:
        to = run.step(version).version
        if to not in run.log.ledger.line:
            raise ConfigError(f"VERSION {to} is not on the live line of run {run.name!r}; see `rollmill versions list`")
        run.log.fence()
        record = run.log.append_rollback(to)
        console.print(f"version {to} is the head (record {record.lsn}); the next one is {run.log.ledger.next_version}")


@one_line_errors
def collect(
    config: ConfigArgument,
    overrides: SetOption = [],  # noqa: B006
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go now, and delete nothing.")] = False,
) -> None:
    """Collect garbage by the run's retention policy: a training run does it by itself."""
    with run_of(config, overrides) as run:
        from infra.store.gc import ORPHAN

        before = run.log.ledger.gc_floor
        found = run.collector.survey() if dry_run else run.collector.collect()
        orphans = sum(state.version == ORPHAN for state in found.doomed)
        versions = ", ".join(str(state.version) for state in found.doomed if state.version != ORPHAN) or "none"
        console.print(
            f"gc floor {before} -> {found.floor}; {'would delete' if dry_run else 'deleted'} the states of versions "
            f"{versions}, {orphans} states that no record names, {len(found.segments)} segments of samples: "
            f"{_size(found.size)}",
            highlight=False,
            soft_wrap=True,
        )
        if found.in_force < found.floor:
            grace = run.config.retention.grace
            console.print(
                f"versions {found.in_force} to {found.floor - 1} wait for retention.grace ({grace:g} s) to pass; run "
                "it again then",
                highlight=False,
                soft_wrap=True,
            )


@contextmanager
def run_of(config: str, overrides: list[str]) -> Iterator[Run]:
    """The run of a configuration, for the duration of a command. Raises ConfigError where there is none."""
    from flows.configure import load_config

    settled = load_config(config, overrides)
    with services(("s3",)):
        from flows.prepare import reach
        from flows.report import no_version, records_of
        from infra.store.log import CommitLog

        store = reach(settled)
        records = records_of(settled, store)
        log = CommitLog(store, settled.prefix, f"operator-{socket.gethostname()}-{os.getpid()}")
        if log.sync().head is None:
            raise no_version(settled, store)
        yield Run(settled, log, records)


def _mark(config: str, overrides: list[str], version: str, mark: str, done: str) -> None:
    with run_of(config, overrides) as run:
        from rl.records import Mark

        step = run.step(version)
        run.log.append_retain(step.version, Mark(mark), step.state if mark == "pin" else None)
        console.print(f"version {step.version} is {done}", highlight=False, soft_wrap=True)


def _there(found: Survey) -> dict[int, StoredState]:
    return {state.version: state for state in found.states if state.version is not None and state.whole}


def _states(found: Survey) -> dict[int, str]:
    return {version: _size(state.size) for version, state in _there(found).items()}


def _ages(found: Survey) -> dict[int, str]:
    return {version: _age(state.age_s) for version, state in _there(found).items()}


def _kept(run: Run, found: Survey) -> dict[int, str]:
    """Why each version stays, or what becomes of it."""
    from rl.records import Step

    said = {}
    for version in (record.version for record in run.records if isinstance(record, Step)):
        reasons = found.reasons.get(version)
        if reasons is None:
            said[version] = "deleted"
        elif version in found.ledger.deleted:
            said[version] = "goes: marked to be deleted"
        elif reasons:
            said[version] = ", ".join(sorted(reasons))
        elif version >= found.floor:
            said[version] = "rolled back; goes with the versions around it"
        else:
            said[version] = f"goes after retention.grace ({run.config.retention.grace:g} s)"
    return said


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
