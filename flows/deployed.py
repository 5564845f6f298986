"""The flows that `prefect.yaml` deploys: each takes one form, so that Prefect's UI shows its fields with their meaning.

Invariants
- They add nothing to the flows of the command line but the form, retries, and a log that the UI shows.
- Retried is what may be mended by itself: a store that does not answer, a wait that was too short, whatever has no
  name. A mistake in a configuration, or a violated invariant, fails at once.
- A training flow goes on from the newest commit, also when it is retried, resumed, or started by a schedule.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from prefect import flow, get_run_logger
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRunPolicy, State
from prefect.context import FlowRunContext
from prefect.states import Cancelled
from rich.console import Console

from flows.configure import cross_check
from flows.evaluate import evaluate_version
from flows.evaluations import Evaluation
from flows.flow_runs import obedient, sign
from flows.forms import CollectForm, EvaluateForm, RunForm, TrainForm, WarmStartForm
from flows.hold import RunHeld
from flows.learn import collector
from flows.prepare import reach, stored_config
from flows.report import Report
from flows.session import open_session
from flows.train import train as train_flow
from flows.warmstart import warmstart as warmstart_flow
from infra.store.errors import StoreUnavailable
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from infra.store.reader import LogReader
from infra.store.runs import run_prefixes
from rl.config.infrastructure import StoreSection
from rl.config.run import RunConfig
from rl.errors import ConfigError, DeadlineExceeded, RollmillError

RETRIES, RETRY_DELAY_S = 2, 60
TARGET = "rollmill.target"
"""Label: the version that a flow run with `more_steps` trains to, also when it is started again."""

R = TypeVar("R")


class NotCollected(RollmillError):
    """Of some runs no garbage was collected; the message says why."""


@flow(name="train", flow_run_name="train {run.title}", retries=RETRIES, retry_delay_seconds=RETRY_DELAY_S)
def train(run: TrainForm) -> Report | State:
    """Train a run; started again, it goes on from the newest commit. Cancelling or pausing it ends its work and leaves
    a run that can be resumed. A run that another flow run trains is left alone."""
    return retried_if_of_use(lambda: _train(run))


def _train(form: TrainForm) -> Report | State:
    config = _with_target(form.config(), form.more_steps)
    cross_check(config)
    try:
        return train_flow.fn(config.name, config, resume=form.resume, console=console())
    except RunHeld as error:
        return Cancelled(message=str(error))


@flow(name="evaluate", flow_run_name="evaluate {run.title}", retries=RETRIES, retry_delay_seconds=RETRY_DELAY_S)
def evaluate(run: EvaluateForm) -> list[Evaluation] | State:
    """Evaluate a version of a run, the newest if none is named, on its held-out problems; it may run beside the
    training."""
    return retried_if_of_use(lambda: evaluate_version.fn(run.title, run.config(), console(), run.version))


@flow(name="warmstart", flow_run_name="warmstart {run.title}", retries=RETRIES, retry_delay_seconds=RETRY_DELAY_S)
def warmstart(run: WarmStartForm) -> str | State:
    """Teach a base model by demonstrations, for the runs that start from it. Done once: the result is kept."""
    return retried_if_of_use(lambda: _warmstart(run.config()))


@obedient
def _warmstart(config: RunConfig) -> str:
    sign(config)
    if config.model.warmstart is None:
        raise ConfigError("model.warmstart is missing: there is nothing to teach; add the section")
    log = CommitLog(reach(config), config.prefix, writer="observer")
    with open_session(config, log, console()) as session:
        return str(warmstart_flow.fn(config.name, session))


@flow(name="gc", flow_run_name="gc {what.title}", retries=RETRIES, retry_delay_seconds=RETRY_DELAY_S)
def gc(what: CollectForm) -> dict[str, str]:
    """Collect garbage by the retention policy of each run; it may run beside the training."""
    return retried_if_of_use(lambda: _collect(what))


def _collect(what: CollectForm) -> dict[str, str]:
    """One run that can not be collected keeps no other from it. Raises NotCollected."""
    told, failed = {}, {}
    for prefix, configured in _collected(what).items():
        try:
            garbage = collector(configured())
            found = garbage.survey() if what.dry_run else garbage.collect()
        except StoreUnavailable:
            raise
        except RollmillError as error:
            failed[prefix] = str(error)
            get_run_logger().error("%s: %s", prefix.rstrip("/"), error)
            continue
        told[prefix] = (
            f"{'would delete' if what.dry_run else 'deleted'} {len(found.doomed)} states and {len(found.segments)} "
            f"segments of samples, {found.size / 1e6:.1f} MB"
        )
        get_run_logger().info("%s: %s", prefix.rstrip("/"), told[prefix])
    if failed:
        raise NotCollected(f"{len(failed)} of {len(told) + len(failed)} runs: {'; '.join(failed.values())}")
    return told


def _collected(what: CollectForm) -> dict[str, Callable[[], RunConfig]]:
    """The prefixes of the runs, each with what reads its configuration."""
    if what.configuration is not None:
        config = RunForm(configuration=what.configuration, name=what.name, tenant=what.tenant).config()
        return {config.prefix: lambda: config}
    here = StoreSection(bucket=what.bucket)  # the run may have been stored by another address
    store = ObjectStore.connect(here)
    store.ensure_bucket(create=False)
    return {
        prefix: partial(_found, store, prefix, here)
        for prefix in run_prefixes(store, what.tenant)
        if what.name in (None, prefix.rstrip("/").rpartition("/")[2])
    }


def _found(store: ObjectStore, prefix: str, here: StoreSection) -> RunConfig:
    return stored_config(store, prefix).model_copy(update={"store": here})


def _with_target(config: RunConfig, more_steps: int | None) -> RunConfig:
    """The configuration with the version to stop at, which a flow run chooses once."""
    if more_steps is None:
        return config
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    kept = context.flow_run.labels.get(TARGET)
    head = LogReader(reach(config), config.prefix).sync().head or 0
    target = int(kept) if kept is not None else head + more_steps
    sign(config, **{TARGET: str(target)})
    return config.model_copy(update={"training": config.training.model_copy(update={"steps": target})})


def retried_if_of_use(body: Callable[[], R]) -> R:
    """Run the body of a flow; an error that another try would meet again takes its retries away."""
    try:
        return body()
    except RollmillError as error:
        context = FlowRunContext.get()
        if not isinstance(error, StoreUnavailable | DeadlineExceeded) and context is not None:
            assert context.flow_run is not None and isinstance(context.client, SyncPrefectClient)
            none = FlowRunPolicy(retries=0, retry_delay=0)
            context.client.update_flow_run(context.flow_run.id, empirical_policy=none)
        raise


class _Log(io.TextIOBase):
    """Lines that are printed, as the log of this flow run."""

    def __init__(self, logger: logging.Logger | logging.LoggerAdapter) -> None:
        self._logger, self._line = logger, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line.strip():
                self._logger.info("%s", line.rstrip())
        return len(text)


def console() -> Console:
    """Prints to the log of this flow run, which the UI shows."""
    return Console(file=_Log(get_run_logger()), width=200, color_system=None)  # type: ignore[arg-type]
