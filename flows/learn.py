"""The learn flow: keeps a trainer alive on a compute GPU until the run is trained, and shows every step.

Invariants: it trains nothing itself; the trainer's truth is the log, so a trainer that died is simply started
again, within its budget; a named failure (a configuration, a violated invariant, another trainer's
fence) is not tried twice. Garbage is collected here, Prefect's task runs too, beside the trainer and only after a
commit.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic, sleep

import typer
from distributed import Client, Future
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.evaluations import pending
from flows.flow_runs import ends_with_its_run, run_tag, sign
from flows.quiet import quiet_failures
from flows.task_runs import Newest
from flows.told import leaving, run_flow
from infra.compute.lifeline import NAMED, die_with_parent, last_words
from infra.compute.pools import connect, wait_for_slots
from infra.proxy.secret import control_key
from infra.store.gc import Background, Collector
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.config.load import dumps, loads
from rl.config.run import RunConfig
from rl.errors import DeadlineExceeded, RollmillError
from rl.placement import placement_of
from tasks.child import Crashed
from tasks.runtime import run_key
from tasks.step import train_process

POLL_S = 0.25


@flow(name="learn", flow_run_name="learn {run}", validate_parameters=False, persist_result=False)
@ends_with_its_run
def learn(run: str, config_file: str, scheduler: str, proxy_url: str) -> int:
    """Train until the log has the last version; that version."""
    config = loads(Path(config_file).read_text())
    sign(config)
    log = CommitLog(ObjectStore.connect(config.store), config.prefix, writer="learn-observer")
    garbage = Background(partial(collector, config), config.retention.collect_every)
    newest = Newest(run_tag(config), config.retention.task_runs)
    with connect(scheduler, config.deadlines.start) as client:
        for left in range(config.restarts.trainer, -1, -1):
            fence = log.sync().fence
            trainer = _start(client, config, proxy_url, config_file)
            try:
                return _watch(config, log, trainer, fence, (garbage.after, newest.after))
            except Crashed as error:
                if left == 0:
                    raise
                print(
                    f"learn: {error}\nlearn: starting the trainer again ({left} left)",
                    file=sys.stderr,
                    flush=True,
                )
    raise AssertionError("unreachable")


@task(task_run_name="step v{version}", cache_policy=NO_CACHE, persist_result=False)
def step(version: int, log: CommitLog, trainer: Future) -> int:
    """Wait for the commit of one version, or for the end of the trainer."""
    while (log.sync().head or 0) < version:
        if trainer.done():
            trainer.result()
            return log.sync().head or 0
        sleep(POLL_S)
    return version


def _watch(
    config: RunConfig, log: CommitLog, trainer: Future, fence: int, after: Sequence[Callable[[int], None]]
) -> int:
    """Follow the trainer to its end. `fence` is the newest one before it was started, `after` is told each version."""
    _wait_for_fence(config, log, trainer, fence)
    head = log.sync().head or 0
    while head < config.training.steps and not trainer.done():
        head = step(head + 1, log, trainer)
        for tell in after:
            tell(head)
    trainer.result(timeout=config.deadlines.batch)
    if (head := log.sync().head or 0) < config.training.steps:
        raise RollmillError(f"the trainer ended at version {head}, before training.steps ({config.training.steps})")
    return head


def collector(config: RunConfig) -> Collector:
    """The garbage collection of a run."""
    log = CommitLog(ObjectStore.connect(config.store), config.prefix, writer=f"gc-{uuid.uuid4().hex[:8]}")
    awaited = partial(pending, config, log.store)
    return Collector(log, config.prefix, config.keeps, config.retention.grace, awaited)


def _wait_for_fence(config: RunConfig, log: CommitLog, trainer: Future, before: int) -> None:
    """Until the trainer took the run over. Raises DeadlineExceeded: its slot may be held by something else."""
    end = monotonic() + config.deadlines.start
    while not trainer.done() and log.sync().fence <= before:
        if monotonic() > end:
            raise DeadlineExceeded(
                f"the trainer made no fence within deadlines.start ({config.deadlines.start:g} s): is its compute_gpu "
                "slot held by another task?"
            )
        sleep(POLL_S)


def _start(client: Client, config: RunConfig, proxy_url: str, config_file: str) -> Future:
    where = placement_of(train_process).preferred()
    wait_for_slots(client, {where}, config.deadlines.start)
    return client.submit(
        train_process,
        run_key(config, dumps(config), proxy_url),
        config_file,
        proxy_url,
        control_key(),
        resources={where.value: 1},
        pure=False,
        retries=0,
        key=f"train-{uuid.uuid4().hex[:8]}",
    )


def main(config_file: Path, scheduler: str, proxy_url: str) -> None:
    """Run the training side of a run as a process of its own."""
    die_with_parent()
    quiet_failures()
    config = loads(config_file.read_text())
    try:
        run_flow(learn, f"{config.tenant}/{config.name}", str(config_file), scheduler, proxy_url)
    except RollmillError as error:
        last_words("learn", error)
        raise SystemExit(NAMED) from None


if __name__ == "__main__":
    leaving(lambda: typer.run(main))
