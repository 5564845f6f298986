"""`rollmill samples`: what was sampled, what became of it, and single trajectories token by token.

Invariant: it only reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

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


@dataclass(frozen=True)
class Filter:
    """What `ls` and `export` select by, each field an option. No state chosen: all but copies of what was trained
    elsewhere."""

    version: Annotated[int | None, typer.Option(help="Only groups that started under this version.")] = None
    domain: Annotated[str | None, typer.Option(help="Only of this domain.")] = None
    min_reward: Annotated[float | None, typer.Option(help="Only groups with at least this mean reward.")] = None
    max_reward: Annotated[float | None, typer.Option(help="Only groups with at most this mean reward.")] = None
    trained: Annotated[bool, typer.Option("--trained", help="Only groups that a step trained.")] = False
    dropped: Annotated[bool, typer.Option("--dropped", help="Only groups that were dropped.")] = False
    open: Annotated[bool, typer.Option("--open", help="Only groups that may still be trained.")] = False

    def samples(self, config: RunConfig, browser: Browser) -> Iterator[Sample]:
        """Those of a run that it lets through, newest first. Raises ConfigError."""
        names = [d.name for d in config.domains]
        if self.domain is not None and self.domain not in names:
            raise ConfigError(f"--domain {self.domain!r} is not in this run; its domains are {', '.join(names)}")
        return filter(self._lets, browser.samples(self.version))

    def _lets(self, sample: Sample) -> bool:
        group, state = sample.group, sample.fate.state
        chosen = {"trained": self.trained, "dropped": self.dropped, "open": self.open}
        if not chosen.get(state, False) if any(chosen.values()) else state == "copy":
            return False
        if self.domain is not None and group.problem.domain != self.domain:
            return False
        if self.min_reward is None and self.max_reward is None:
            return True
        if not group.members:
            return False
        mean = fmean(group.rewards)
        at_least, at_most = self.min_reward, self.max_reward
        return (at_least is None or mean >= at_least) and (at_most is None or mean <= at_most)


def selecting(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `Filter` for its parameter `wanted`."""
    fields = signature(Filter, eval_str=True).parameters

    @wraps(command)
    def selected(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in fields}
        command(**given, wanted=Filter(**chosen))

    parameters: list[Parameter] = []
    for name, own in signature(command, eval_str=True).parameters.items():
        parameters += fields.values() if name == "wanted" else [own]
    in_any_order = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
    selected.__signature__ = Signature(in_any_order)  # type: ignore[attr-defined]
    return selected


@app.command()
@one_line_errors
@selecting
def ls(
    config: ConfigArgument,
    wanted: Filter,
    overrides: SetOption = [],  # noqa: B006
    limit: Annotated[int, typer.Option(min=1, help="The newest so many groups.")] = 50,
) -> None:
    """The sealed groups of a run, newest first."""
    with _run(config, overrides) as (settled, _, browser):
        found = list(islice(wanted.samples(settled, browser), limit))
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
@selecting
def export(
    config: ConfigArgument,
    to: Annotated[Path, typer.Option(help="A file that ends in .parquet or .jsonl.")],
    wanted: Filter,
    overrides: SetOption = [],  # noqa: B006
) -> None:
    """The selected groups as one file for pandas, polars or datasets: one row per trajectory, and what became of it."""
    from infra.store.export import FORMATS, write_samples

    if to.suffix not in FORMATS:
        raise ConfigError(f"--to {str(to)!r}: a file of type {' or '.join(FORMATS)} can be written; name one")
    if not to.parent.is_dir():
        raise ConfigError(f"--to {str(to)!r}: directory {str(to.parent)!r} does not exist; make it, or name another")
    with _run(config, overrides) as (settled, _, browser):
        groups, rows = write_samples(wanted.samples(settled, browser), to)
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
