"""The evaluate flow: held-out evaluation of one version of a run, without training.

Invariants
- It writes nothing but the evaluation itself; a version that was evaluated is not evaluated again.
- A version that can not be evaluated is refused before anything is started: one that is not on the live line, whose
  evaluations are no part of what the run came to, or whose weights are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefect import flow
from rich.console import Console

from flows.evaluations import Evaluation, load
from flows.flow_runs import obedient, sign
from flows.prepare import join_run
from flows.session import open_session
from infra.store.log import CommitLog
from infra.store.manifest import MANIFEST
from rl.config.run import RunConfig
from rl.errors import ConfigError
from rl.records import Record, Step
from rl.rollback import live_line

SEE = "see `rollmill versions list`"


@flow(name="evaluate", flow_run_name="evaluate {name}", validate_parameters=False, persist_result=False)
@obedient
def evaluate_version(
    name: str, config: RunConfig, console: Console | None = None, version: int | None = None
) -> list[Evaluation]:
    """Evaluate a version of a run, the head if none is named. Raises ConfigError when there is no such version, or
    none yet."""
    config, log = join_run(config)
    sign(config)
    console = console or Console(quiet=True)
    if log.ledger.head is None:
        raise ConfigError(f"run {config.prefix.rstrip('/')!r} has no version yet; train it first")
    records = [] if version is None else log.history()
    if version is not None:
        check_line(config, records, version)
    if (kept := load(config, log.store, log.ledger.head if version is None else version)) is not None:
        for evaluation in kept:
            console.print(str(evaluation), highlight=False)
        return kept
    if version is not None:
        check_weights(config, log, records, version)
    with open_session(config, log, console) as session:
        session.start_engine()
        if version is None:
            version = session.wait_until_serving()
        else:
            session.serve(version)
        return session.evaluate(version)


def check_line(config: RunConfig, records: Sequence[Record], version: int) -> None:
    """Raises ConfigError unless the version is on the live line, whether its weights are there or not."""
    line, known = _line(records), [record.version for record in records if isinstance(record, Step)]
    if version not in known:
        raise ConfigError(
            f"{_named(config, version)} does not exist; there are {_told(known)}: name one of them, {SEE}"
        )
    if version not in line:
        raise ConfigError(
            f"{_named(config, version)} was rolled back; the live line is {_told(line)}: name one of them, {SEE}"
        )


def check_weights(config: RunConfig, log: CommitLog, records: Sequence[Record], version: int) -> None:
    """Raises ConfigError unless the weights of the version, which is on the live line, are there to stay for now."""
    keys = set(log.store.keys(f"{config.prefix}state/"))
    manifests = {r.version: f"{config.prefix}{r.state.prefix}{MANIFEST}" for r in records if isinstance(r, Step)}
    there = [v for v in _line(records) if manifests[v] in keys and v not in log.ledger.deleted]
    if version not in there:
        raise ConfigError(
            f"{_named(config, version)}: its weights were deleted; there are those of {_told(there)}: name one of "
            f"them, {SEE}"
        )


def _line(records: Iterable[Record]) -> list[int]:
    return [step.version for step in live_line([], records)]


def _named(config: RunConfig, version: int) -> str:
    return f"VERSION {version} of run {config.prefix.rstrip('/')!r}"


def _told(versions: Iterable[int]) -> str:
    """As people write them: 0, 3 to 5 and 9."""
    spans: list[list[int]] = []
    for version in sorted(versions):
        if spans and version == spans[-1][1] + 1:
            spans[-1][1] = version
        else:
            spans.append([version, version])
    told = [str(a) if a == b else f"{a} to {b}" for a, b in spans]
    return " and ".join([", ".join(told[:-1]), told[-1]] if len(told) > 1 else told)
