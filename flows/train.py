"""The train flow: one run from its configuration to its report, on a laptop or on a cluster.

    prepare -> pools -> warm start -> engine and proxy, learn process -> evaluate -> rollout process
            -> ... until the last version is committed (and every n-th one is evaluated beside) ...
            -> update engines -> evaluate -> report

Invariants
- Rollout and training are processes of their own, which share only the store and the proxy; each is started
  again, within its budget, when it dies, and the run goes on from the log.
- Whatever ends the flow, nothing that it started outlives it.
- Of two flows that train one run the second is refused; what the UI asks, to pause or to stop, is obeyed.
- Run again with `resume`, it goes on from the newest commit; what was done is not done twice.
"""

from __future__ import annotations

from time import monotonic, sleep

from prefect import flow
from rich.console import Console

from flows.evaluations import pending
from flows.flow_runs import obedient
from flows.hold import held
from flows.prepare import has_base, open_run, push_base
from flows.publication import publish
from flows.report import Report, write_report
from flows.session import PERIOD_S, Session, open_session
from flows.supervise import PartFailed
from flows.warmstart import initial_model
from flows.watch import Watch
from rl.config.run import RunConfig


@flow(name="train", flow_run_name="train {name}", validate_parameters=False, persist_result=False)
@obedient
def train(name: str, config: RunConfig, resume: bool = False, console: Console | None = None) -> Report:
    """Train one run to its last version. `name` is for people; the run is `config`."""
    with held(config):
        return _run(config, resume, console or Console(quiet=True))


def _run(config: RunConfig, resume: bool, console: Console) -> Report:
    started = monotonic()
    log = open_run(config, resume)
    with open_session(config, log, console) as session:
        if not has_base(config, log.store):
            session.console.print("preparing the initial model", highlight=False)
            push_base(config, log.store, initial_model(session))
        _train(session)
    report = write_report(config, log.store, session.work_dir, "train", monotonic() - started)
    publish(config, log.store, report)
    return report


def _train(session: Session) -> None:
    """From version 0 to the last one."""
    config, log = session.config, session.log
    steps = config.training.steps
    session.start_engine()
    learn = session.start("learn", config.restarts.trainer)
    session.wait_until_serving(lambda: learn.check(session.console))
    if log.sync().head == 0:
        session.evaluate(0)
    evaluators = []
    if config.evaluation.due(steps, steps):
        evaluators.append(session.start("evaluator", config.restarts.engine))
    if (log.sync().head or 0) < steps:
        rollout = session.start("rollout", config.restarts.rollout)
        with Watch(session) as watch:
            while (log.sync().head or 0) < steps:
                for part in (learn, rollout, *evaluators):
                    part.check(session.console)
                    if part.done and (log.sync().head or 0) < steps:
                        raise PartFailed(f"{part.name} ended before version {steps} was there; see {part.log}")
                watch.refresh()
                sleep(PERIOD_S)
    learn.finish(session.console, config.deadlines.batch)
    for evaluator in evaluators:
        left = len(pending(config, log.store, log.sync()))
        evaluator.finish(session.console, config.deadlines.start + (1 + left) * config.deadlines.trajectory)
    session.serve(steps)
    session.evaluate(steps)
