"""The evaluator flow: evaluates every n-th version while training goes on, with an engine of its own.

Invariants
- No version is left out: one that is due stays in the store until it is evaluated (`rl.retention`), and the run ends
  after the last one was.
- It writes nothing but evaluations, and may be killed and started again at any moment: what is not there is made.
- It never touches the engines of rollout.
"""

from __future__ import annotations

from pathlib import Path
from time import sleep

import typer
from prefect import flow
from rich.console import Console

from flows.evaluations import pending
from flows.flow_runs import ends_with_its_run, sign
from flows.quiet import quiet_failures
from flows.session import Session
from flows.told import leaving, run_flow
from infra.compute.lifeline import NAMED, die_with_parent, last_words
from infra.compute.pools import connect
from infra.compute.signals import wanted
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.config.load import loads
from rl.config.run import RunConfig
from rl.errors import RollmillError

POLL_S = 1.0


@flow(name="evaluator", flow_run_name="evaluate {run} on the way", validate_parameters=False, persist_result=False)
@ends_with_its_run
def evaluator(run: str, config_file: str, scheduler: str) -> int:
    """Evaluate what is due until the last version is committed; how many versions were evaluated."""
    config = loads(Path(config_file).read_text())
    sign(config)
    alone = config.model_copy(update={"engine": config.engine.single})
    log = CommitLog(ObjectStore.connect(config.store), config.prefix, writer="evaluator")
    with connect(scheduler, config.deadlines.start) as client:
        session = Session(alone, log, client, scheduler, Console(quiet=True), "evaluator")
        try:
            with wanted(client, session.key):
                return _follow(config, session)
        finally:
            session.stop()


def _follow(config: RunConfig, session: Session) -> int:
    log, count, seen = session.log, 0, None
    while True:
        ledger = log.sync()
        if ledger.lsn == seen:  # nothing new, so nothing is due, and what is kept need not be listed again
            sleep(POLL_S)
            continue
        due = pending(config, log.store, ledger)
        if not due:
            if (ledger.head or 0) >= config.training.steps:
                return count
            seen = ledger.lsn
            continue
        if count == 0:
            session.start_engine()
        session.serve(due[0])
        for result in session.evaluate(due[0]):
            print(result, flush=True)
        count += 1


def main(config_file: Path, scheduler: str) -> None:
    """Run the evaluations on the way as a process of its own."""
    die_with_parent()
    quiet_failures()
    config = loads(config_file.read_text())
    try:
        run_flow(evaluator, f"{config.tenant}/{config.name}", str(config_file), scheduler)
    except RollmillError as error:
        last_words("evaluator", error)
        raise SystemExit(NAMED) from None


if __name__ == "__main__":
    leaving(lambda: typer.run(main))
