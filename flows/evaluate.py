"""The evaluate flow: held-out evaluation of the newest version of a run, without training.

Invariant: it writes nothing but the evaluation itself; a version that was evaluated is not evaluated again.
"""

from __future__ import annotations

from prefect import flow
from rich.console import Console

from flows.evaluations import Evaluation
from flows.flow_runs import obedient, sign
from flows.prepare import join_run
from flows.session import open_session
from rl.config.run import RunConfig
from rl.errors import ConfigError


@flow(name="evaluate", flow_run_name="evaluate {name}", validate_parameters=False, persist_result=False)
@obedient
def evaluate_newest(name: str, config: RunConfig, console: Console | None = None) -> list[Evaluation]:
    """Evaluate the head of a run. Raises ConfigError when it has no version yet."""
    config, log = join_run(config)
    sign(config)
    if log.ledger.head is None:
        raise ConfigError(f"run {config.prefix.rstrip('/')!r} has no version yet; train it first")
    with open_session(config, log, console or Console(quiet=True)) as session:
        session.start_engine()
        return session.evaluate(session.wait_until_serving())
