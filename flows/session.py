"""What a flow holds while a run is live: pools, engines and proxy, and the processes it started.

Invariant: leaving the context announces the stop, ends every process, and closes a local cluster: nothing that
the session started outlives it. The keys of a run are made here, anew for each session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from distributed import Client, Future
from rich.console import Console

from flows.engine_tasks import EngineTasks, until_ended
from flows.evaluation import evaluate
from flows.evaluations import Evaluation
from flows.flow_runs import Orders, crash_the_gone_of
from flows.home import Home
from flows.supervise import Part
from infra.compute.pools import cluster, connect, slots, wait_for_slots
from infra.compute.signals import wanted
from infra.proxy.auth import Keys
from infra.proxy.client import ControlClient
from infra.proxy.secret import CONTROL_KEY, ROLLOUT_KEY
from infra.services.processes import free_port
from infra.store.log import CommitLog
from rl.config.base import Section
from rl.config.load import dumps
from rl.config.run import RunConfig
from rl.config.tenants import ServiceConfig
from rl.errors import DeadlineExceeded, PlacementError, RollmillError
from rl.placement import HardwareClass, placement_of, preflight
from tasks.admit import admit
from tasks.functions import check_functions
from tasks.interact import interact
from tasks.reset import reset
from tasks.runtime import install, uninstall
from tasks.score import score
from tasks.step import train_process

PERIOD_S = 0.2
TASK_LOGS = "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL"
"""Prefect's line per task run, which tells the durations of its stages: for those who chose to look closer."""
STOP_S = 15.0
STAGES = (reset, interact, score, admit, train_process)


class Session:
    """One live run, or a `part` of it with engines of its own; or a `service`, whose host the run is."""

    def __init__(
        self,
        config: RunConfig,
        log: CommitLog,
        client: Client,
        address: str,
        console: Console,
        part: str = "",
        service: ServiceConfig | None = None,
    ):
        self.config, self.log, self.client, self.address, self.console = config, log, client, address, console
        self.work_dir: Path = Home.default().run(config) / part
        self.proxy_url = f"http://{config.pools.host}:{free_port(set())}"
        self.keys = Keys.random()
        self.key = install(client, config, self.proxy_url, Home.default().cache, self.keys.rollout)
        self.config_file = self._write("config", config)
        self.service_file = None if service is None else self._write("service", service)
        self.proxy = ControlClient(self.proxy_url, deadline_s=config.deadlines.control, key=self.keys.control)
        self.orders = Orders.here()
        self.tasks: list[Future] = []
        """Long tasks that end when the session is no longer wanted, besides the engines'."""
        self._parts: list[Part] = []
        self._engines = EngineTasks(
            client, config, self.key, self.proxy_url, self.work_dir, self.keys, console, service
        )

    def _write(self, name: str, config: Section) -> Path:
        """A resolved configuration as a file of this session, for its processes: complete or absent."""
        path = self.work_dir / f"{name}-{self.key.rpartition('@')[2]}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_text(dumps(config))
        draft.replace(path)
        return path

    def start(self, name: str, restarts: int) -> Part:
        """The flow `flows.{name}` as a process of its own."""
        module = [f"flows.{name}", str(self.service_file or self.config_file), self.address]
        given: dict[str, str] = {}
        if name != "evaluator":  # which has engines of its own
            module.append(self.proxy_url)
            given = {ROLLOUT_KEY: self.keys.rollout} if name.endswith("rollout") else {CONTROL_KEY: self.keys.control}
        if name == "rollout" and self.config.rollout.unit != "group":
            given[TASK_LOGS] = "INFO"
        part = Part(name, module, self.work_dir / "logs" / f"{name}.log", restarts, given, self._look)
        self._parts.append(part)
        return part

    def _look(self, died: bool) -> None:
        """While a part is watched: the engines, what the UI asks; and what a part that died has left Running there."""
        if died:
            crash_the_gone_of(self.config)
        self.check_engine()

    def start_engine(self) -> None:
        """The proxy with its engines; it serves as soon as the log names a version."""
        self._engines.start()

    def wait_until_serving(self, meanwhile: Callable[[], None] = lambda: None) -> int:
        """Until the engine serves a version; that version. Raises DeadlineExceeded, or what ended the engine."""
        deadline_s, told = self._engines.start_s, ""
        end = monotonic() + deadline_s
        while True:
            meanwhile()
            self.check_engine()
            try:
                status = self.proxy.status(deadline_s=1.0)
                if status.serving is not None and status.engine.get("ready", 1):
                    return status.serving
                trouble = troubles(status.engine)
                missing = "no version was committed" if status.serving is None else f"no engine is ready{trouble}"
                if trouble and trouble != told:  # somebody else may have to see to it
                    self.console.print(f"waiting for an engine{trouble}", highlight=False, soft_wrap=True)
                    told = trouble
            except RollmillError as error:
                missing = str(error)
            if monotonic() > end:
                raise DeadlineExceeded(f"nothing is served within {deadline_s:g} s (deadlines.start): {missing}")
            sleep(PERIOD_S)

    def wait_until_up(self) -> None:
        """Until the proxy answers, whatever it serves. Raises DeadlineExceeded, or what ended the engine."""
        deadline_s = self._engines.start_s
        end = monotonic() + deadline_s
        while True:
            self.check_engine()
            try:
                self.proxy.tenants(deadline_s=1.0)
                return
            except RollmillError as error:
                if monotonic() > end:
                    raise DeadlineExceeded(f"no proxy within {deadline_s:g} s (deadlines.start): {error}") from error
            sleep(PERIOD_S)

    def serve(self, version: int) -> None:
        """Bring the engines, once they serve any, to a committed version, outside of a training step."""
        if self.wait_until_serving() == version:
            return
        fence = self.log.sync().fence
        seconds, key = self.config.deadlines.control, self.keys.control
        control = ControlClient(self.proxy_url, deadline_s=seconds, fence=fence, key=key)
        control.suspend()
        try:
            control.update(version, oldest_viable=version)
        finally:
            control.resume()

    def check_engine(self) -> None:
        """Start the proxy again, within its budget, if it or its worker died. Raises what else ended it, or the last
        engine, or what the UI asks for."""
        self.orders.check()
        self._engines.check()

    def evaluate(self, version: int) -> list[Evaluation]:
        """Held-out evaluation of the version that is served."""
        results = evaluate(self.config, self.log.store, self.client, self.key, version, self.check_engine)
        for result in results:
            self.console.print(str(result), highlight=False)
        return results

    def stop(self) -> None:
        """End what the session started; the engine does so by itself, for its lease is over."""
        with ThreadPoolExecutor(max(1, len(self._parts))) as threads:
            list(threads.map(Part.stop, self._parts))
        crash_the_gone_of(self.config)
        self._engines.wait(STOP_S)
        until_ended(self.tasks, STOP_S)
        uninstall(self.client, self.key)


@contextmanager
def open_session(
    config: RunConfig, log: CommitLog, console: Console, service: ServiceConfig | None = None
) -> Iterator[Session]:
    """Pools and functions checked, nothing running yet. Raises DeadlineExceeded, PlacementError, ConfigError,
    ServerlessError."""
    with ExitStack() as stack:
        address = stack.enter_context(cluster(config.pools, config.deadlines.start))
        client = stack.enter_context(connect(address, config.deadlines.start))
        check_placement(config, client, 1 if service is None else service.trainers)
        check_functions(config)
        session = Session(config, log, client, address, console, service=service)
        stack.callback(session.stop)
        stack.enter_context(wanted(client, session.key))
        yield session


def troubles(fleet: dict[str, Any]) -> str:
    """What a proxy says of its engines that do not serve, and why."""
    causes = [f"{engine['name']}: {engine['cause']}" for engine in fleet.get("engines", ()) if engine.get("cause")]
    return f" ({'; '.join(causes)})" if causes else ""


def check_placement(config: RunConfig, client: Client, trainers: int = 1) -> None:
    """Every class has workers and every stage a class. Raises DeadlineExceeded, PlacementError."""
    engines = {HardwareClass(name): count for name, count in config.engine_slots.items() if count}
    needed = {placement_of(stage).preferred() for stage in STAGES} | set(engines)
    wait_for_slots(client, needed - {HardwareClass.LAMBDA}, config.deadlines.start)
    found = slots(client)
    preflight(STAGES, [d.name for d in config.domains], found)
    for name, count in ({HardwareClass.COMPUTE_GPU: 0} | engines).items():
        wanted = count + trainers * (name is HardwareClass.COMPUTE_GPU)
        if found[name] < wanted:
            raise PlacementError(
                f"pools: {found[name]:g} slots of {name} for {count} engines and {wanted - count} trainers; add "
                f"workers, or ask for fewer in engine.instances"
            )
