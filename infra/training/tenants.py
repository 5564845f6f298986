"""The process of a tenants' trainer: `python -m infra.training.tenants SERVICE.json --trainer N --proxy-url URL`.

    main thread      the base, all adapters, every update, one after another (`infra.training.turns`, `.roster`)
    manager thread   the job book (`infra.training.manager`)
    bell thread      what arrived, and whose desk it wakes (`infra.training.bells`)
    desk threads     one for each job: batches, versions, engines (`infra.training.desk`)

Runs until it is told to stop (SIGTERM). Exit code 4: a named error, one line on stderr; whatever the moment of its
death, the next one goes on with every job from its log.

Invariant: what can not be computed any more, or can not be known of the jobs, ends the process, and nothing less does.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from infra.compute.lifeline import die_with_parent, last_words
from infra.compute.scratch import scratch
from infra.proxy.auth import tenant_key
from infra.proxy.secret import control_key
from infra.store.arrivals import Arrivals
from infra.store.directories import pull_directory
from infra.store.errors import StoreUnavailable
from infra.store.jobs import JobBook
from infra.store.objects import ObjectStore
from infra.store.weights import WeightStore
from infra.training import setup
from infra.training.bells import Bells
from infra.training.blame import Blame
from infra.training.desk import Shop
from infra.training.loop import exit_code
from infra.training.manager import Manager
from infra.training.roster import Roster
from infra.training.turns import Turns
from rl.config.tenants import ServiceConfig
from rl.errors import RollmillError

PERIOD_S = 1.0
"""Between two looks at the job book."""
LISTEN_S = 0.1
"""Between two looks at what arrived."""
CLOSE_S = 20.0
"""How long an ending trainer waits for its desks."""

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.training.tenants", description=__doc__.splitlines()[0])
    parser.add_argument("service", type=Path, help="resolved configuration of the service, as JSON")
    parser.add_argument("--trainer", type=int, required=True, help="number of this trainer, from 0")
    parser.add_argument("--proxy-url", required=True, help="base URL of the LLM proxy")
    arguments = parser.parse_args(argv)
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        service = setup.read_config(ServiceConfig, arguments.service)
        train(service, arguments.trainer, arguments.proxy_url, arguments.service.resolve().parent)
    except RollmillError as error:
        last_words(f"trainer {arguments.trainer}: {type(error).__name__}", error)
        return exit_code(error)
    return 0


def train(
    service: ServiceConfig, number: int, proxy_url: str, directory: Path, stop: threading.Event | None = None
) -> None:
    """Train what the job book says is this trainer's, until `stop`, with files below `directory`. Raises a
    RollmillError."""
    setup.prepare_process(service.threads)
    stop = stop or threading.Event()
    with ExitStack() as stack:
        work_dir = stack.enter_context(scratch(directory, f"trainer-{number}"))
        store = ObjectStore.connect(service.store)
        base = pull_directory(store, service.prefix + "base/", None, work_dir / "base")
        weights = stack.enter_context(closing(WeightStore.open(service.weights, store, lend=True)))
        blame = Blame(directory / f"trainer-{number}.turn")
        turns = Turns(service.queue.slack, service.queue.patience, blame)
        roster = Roster(base, service.model.dtype, service.resident, work_dir / "roster")
        arrivals = Arrivals(store, service.name)
        bells = Bells(arrivals.look)
        shop = Shop(
            store, weights.beside, base, work_dir, roster, turns, bells, lambda: arrivals.in_line, proxy_url, _key
        )
        manager = Manager(service, number, JobBook(store, service.name), shop, blame)
        stack.callback(manager.close, CLOSE_S)
        stack.callback(turns.close)
        watches = [
            stack.enter_context(_Watch("manager", manager.look, PERIOD_S)),
            stack.enter_context(_Watch("bells", bells.listen, LISTEN_S)),
        ]
        log.info("trainer %d: up to %d jobs in memory", number, service.resident)
        while not stop.is_set():
            turns.serve(PERIOD_S / 2)
            for watch in watches:
                watch.check()


def _key(name: str) -> str | None:
    """Of the policy of this name; None where the proxy asks for none."""
    master = control_key()
    return None if master is None else tenant_key(master, name)


class _Watch:
    """Calls `look` every `period_s` on a thread of its own, for as long as the block lasts."""

    def __init__(self, name: str, look: Callable[[], None], period_s: float) -> None:
        self._name, self._look, self._period_s = name, look, period_s
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(CLOSE_S)

    def check(self) -> None:
        """Raises what ended it."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                try:
                    self._look()
                except StoreUnavailable as error:  # for a while: the service itself gives up, if that is to be
                    log.warning("%s: %s", self._name, error)
                self._ended.wait(self._period_s)
        except BaseException as error:
            self._failure = error


if __name__ == "__main__":
    # an orderly end: engines are resumed, files removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
