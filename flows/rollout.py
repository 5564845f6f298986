"""The rollout flow: keeps as many groups in flight as the staleness bound allows, until the run is trained.

Invariant: it may be killed and started again at any moment (see `flows.feeder`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeVar

import typer
from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from flows.feeder import Feeder
from flows.flow_runs import ends_with_its_run, sign
from flows.quiet import quiet_failures
from flows.told import leaving, run_flow
from flows.units import threads
from infra.compute.lifeline import NAMED, die_with_parent, last_words
from infra.compute.pools import connect, wait_for_slots
from infra.proxy.client import ControlClient, ProxyUnavailable
from infra.proxy.secret import rollout_key
from rl.config.load import loads
from rl.config.run import RunConfig
from rl.errors import RollmillError
from rl.placement import HardwareClass

POLL_S = 0.1
"""Between two looks at the served version, while nothing ends."""

T = TypeVar("T")


@flow(name="rollout", flow_run_name="rollout {run}", validate_parameters=False, persist_result=False)
@ends_with_its_run
def rollout(run: str, config_file: str, scheduler: str, proxy_url: str) -> int:
    """Roll out groups until the log has the last version; the number of groups sealed by this process."""
    config = loads(Path(config_file).read_text())
    sign(config)
    with connect(scheduler, config.deadlines.start) as client:
        pools = wait_for_slots(client, {HardwareClass.CPU}, config.deadlines.start)
        feeder = Feeder(config, client, proxy_url, pools, rollout_key())
        proxy = ControlClient(proxy_url, deadline_s=config.deadlines.control, key=rollout_key())
        feeder.begin()
        try:
            while True:
                serving = served(config, lambda: proxy.status().serving)  # before the log, which is never behind it
                if feeder.trained():
                    return feeder.sealed
                if serving is not None:
                    feeder.start(feeder.admissible(serving), serving)
                feeder.collect(POLL_S)
        finally:
            feeder.cancel()


def served(config: RunConfig, ask: Callable[[], T]) -> T:
    """What the proxy answers. One that is away is being started again: wait for it, but not for ever."""
    end = monotonic() + config.deadlines.start
    while True:
        try:
            return ask()
        except ProxyUnavailable:
            if monotonic() > end:
                raise
            sleep(POLL_S)


def main(config_file: Path, scheduler: str, proxy_url: str) -> None:
    """Run the rollout side of a run as a process of its own."""
    die_with_parent()
    quiet_failures()
    config = loads(config_file.read_text())
    most = config.training.group_size + max(config.training.group_size, config.rollout.redundancy.extra_members or 0)
    waiting = config.policy.buffer_groups * threads(config.rollout.unit, most)
    runner: Any = ThreadPoolTaskRunner(max_workers=waiting + 8)
    try:
        flow = rollout.with_options(task_runner=runner)
        run_flow(flow, f"{config.tenant}/{config.name}", str(config_file), scheduler, proxy_url)
    except RollmillError as error:
        last_words("rollout", error)
        raise SystemExit(NAMED) from None


if __name__ == "__main__":
    leaving(lambda: typer.run(main))
