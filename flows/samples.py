"""`rollmill samples`: what was sampled, what became of it, and single trajectories token by token.

Invariant: it only reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from flows.command import ConfigArgument, SetOption, console, one_line_errors, services
from rl.errors import ConfigError

if TYPE_CHECKING:
    from infra.store.browse import Browser, Sample
    from infra.store.objects import ObjectStore
    from rl.config.run import RunConfig

app = typer.Typer(help="Look at the samples of a run.", no_args_is_help=True)

TOKENIZER = ("*token*", "*.json", "*.txt", "*.model", "*.jinja")
"""The files of a model directory that are not its weights."""

VersionOption = Annotated[int | None, typer.Option(help="Only groups that started under this version.")]
DomainOption = Annotated[str | None, typer.Option(help="Only of this domain.")]
LeastOption = Annotated[float | None, typer.Option(help="Only groups with at least this mean reward.")]
MostOption = Annotated[float | None, typer.Option(help="Only groups with at most this mean reward.")]
TrainedOption = Annotated[bool, typer.Option("--trained", help="Only groups that a step trained.")]
DroppedOption = Annotated[bool, typer.Option("--dropped", help="Only groups that were dropped.")]
OpenOption = Annotated[bool, typer.Option("--open", help="Only groups that may still be trained.")]


@dataclass(frozen=True)
class Filter:
    """What `ls` and `export` select by. `states` empty: all but copies of what was trained elsewhere."""

    version: int | None
    domain: str | None
    least: float | None
    most: float | None
    states: frozenset[str]

    def __call__(self, sample: Sample) -> bool:
        group = sample.group
        if sample.fate.state not in self.states if self.states else sample.fate.state == "copy":
            return False
        if self.domain is not None and group.problem.domain != self.domain:
            return False
        if self.least is None and self.most is None:
            return True
        if not group.members:
            return False
        mean = fmean(group.rewards)
        return (self.least is None or mean >= self.least) and (self.most is None or mean <= self.most)


@app.command()
@one_line_errors
def ls(
    config: ConfigArgument,
    overrides: SetOption = [],  # noqa: B006
    version: VersionOption = None,
    domain: DomainOption = None,
    min_reward: LeastOption = None,
    max_reward: MostOption = None,
    trained: TrainedOption = False,
    dropped: DroppedOption = False,
    open_: OpenOption = False,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many groups.")] = 50,
) -> None:
    """The sealed groups of a run, newest first."""
    with _run(config, overrides) as (settled, _, browser):
        wanted = _filter(settled, version, domain, min_reward, max_reward, trained, dropped, open_)
        found = list(islice(filter(wanted, browser.samples(version)), limit))
        if not found:
            raise ConfigError(f"run {settled.prefix.rstrip('/')!r} has no such samples: loosen the filters, or wait")
        from flows.sheet import groups_table

        console.print(groups_table(found), highlight=False, soft_wrap=True, markup=False)
        if len(found) == limit:
            console.print(f"the newest {limit}; --limit shows more", highlight=False)


@app.command()
@one_line_errors
def show(
    config: ConfigArgument,
    uid: Annotated[str, typer.Argument(help="ordinal.attempt, as `samples ls` shows it.")],
    overrides: SetOption = [],  # noqa: B006
    member: Annotated[int | None, typer.Option(help="One trajectory of the group; without it, all in short.")] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="The text of every run of tokens, by the tokenizer.")
    ] = False,
) -> None:
    """One group, or one of its trajectories: messages, rewards, and which tokens the model generated."""
    with _run(config, overrides) as (settled, store, browser):
        sample = _find(settled, browser, uid)
        from flows.sheet import group_sheet, trajectory_sheet

        if member is None and not tokens and len(sample.group.members) != 1:
            text = group_sheet(sample)
        else:
            one = _member(sample, member or 0)
            text = trajectory_sheet(sample, one, _decoder(settled, store) if tokens else None)
        console.print(text, highlight=False, soft_wrap=True, markup=False)


@app.command()
@one_line_errors
def export(
    config: ConfigArgument,
    to: Annotated[Path, typer.Option(help="A file that ends in .parquet or .jsonl.")],
    overrides: SetOption = [],  # noqa: B006
    version: VersionOption = None,
    domain: DomainOption = None,
    min_reward: LeastOption = None,
    max_reward: MostOption = None,
    trained: TrainedOption = False,
    dropped: DroppedOption = False,
    open_: OpenOption = False,
) -> None:
    """The selected groups as one file for pandas, polars or datasets: one row per trajectory, and what became of it."""
    from infra.store.export import FORMATS, write_samples

    if to.suffix not in FORMATS:
        raise ConfigError(f"--to {str(to)!r}: a file of type {' or '.join(FORMATS)} can be written; name one")
    if not to.parent.is_dir():
        raise ConfigError(f"--to {str(to)!r}: directory {str(to.parent)!r} does not exist; make it, or name another")
    with _run(config, overrides) as (settled, _, browser):
        wanted = _filter(settled, version, domain, min_reward, max_reward, trained, dropped, open_)
        groups, rows = write_samples(filter(wanted, browser.samples(version)), to)
        console.print(f"{to}: {groups} groups, {rows} trajectories", highlight=False, soft_wrap=True)


@contextmanager
def _run(config: str, overrides: list[str]) -> Iterator[tuple[RunConfig, ObjectStore, Browser]]:
    from flows.configure import load_config

    settled = load_config(config, overrides)
    with services(("s3",)):
        from flows.prepare import reach
        from flows.report import records_of
        from infra.store.browse import Browser, fates

        store = reach(settled)
        yield settled, store, Browser(store, settled.prefix, fates(records_of(settled, store)))


def _filter(
    config: RunConfig,
    version: int | None,
    domain: str | None,
    least: float | None,
    most: float | None,
    trained: bool,
    dropped: bool,
    open_: bool,
) -> Filter:
    names = [d.name for d in config.domains]
    if domain is not None and domain not in names:
        raise ConfigError(f"--domain {domain!r} is not in this run; its domains are {', '.join(names)}")
    chosen = {"trained": trained, "dropped": dropped, "open": open_}
    return Filter(version, domain, least, most, frozenset(name for name, yes in chosen.items() if yes))


def _find(config: RunConfig, browser: Browser, text: str) -> Sample:
    from rl.trajectory import Uid

    try:
        uid = Uid.parse(text)
    except ValueError:
        raise ConfigError(f"UID {text!r} is not 'ordinal.attempt', such as 12.0; see `rollmill samples ls`") from None
    sample = browser.find(uid)
    if sample is None:
        raise ConfigError(
            f"UID {uid}: no sealed group of that name in run {config.prefix.rstrip('/')!r}, or not any more (its log "
            f"says: {browser.fate(uid)}); `rollmill samples ls` shows what is there"
        )
    return sample


def _member(sample: Sample, member: int) -> int:
    members = sample.group.members
    if not members:
        raise ConfigError(f"UID {sample.group.uid}: it was given up ({sample.group.tombstone}) and has no trajectory")
    if member >= len(members) or member < 0:
        raise ConfigError(f"--member {member}: group {sample.group.uid} has members 0 to {len(members) - 1}")
    return member


def _decoder(config: RunConfig, store: ObjectStore) -> Callable[[list[int]], str]:
    """Token ids to text, by the tokenizer of the run's base."""
    from tempfile import TemporaryDirectory

    from infra.store.directories import pull_directory
    from infra.store.errors import NotFound

    with TemporaryDirectory() as cache:
        try:
            base = pull_directory(store, config.base_prefix, None, Path(cache), only=TOKENIZER)
        except NotFound:
            raise ConfigError(f"--tokens: run {config.prefix.rstrip('/')!r} has no base model yet") from None
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(base, local_files_only=True).decode
