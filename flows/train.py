"""The train flow: one run from its configuration to its report, on a laptop or on a cluster.

    prepare -> pools -> warm start -> learn process -> engine and proxy -> evaluate -> rollout process
            -> ... until the last version is committed ... -> update engines -> evaluate -> report

Invariants
- Rollout and training are processes of their own, which share only the store and the proxy; each is started
  again, within its budget, when it dies, and the run goes on from the log.
- Whatever ends the flow, nothing that it started outlives it.
- Run again with `resume`, it goes on from the newest commit; what was done is not done twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic, sleep

from distributed import Client, Future
from prefect import flow
from rich.console import Console

from flows.evaluate import evaluate
from flows.home import Home
from flows.prepare import has_base, open_run, push_base
from flows.progress import Progress
from flows.report import Report, write_report
from flows.supervise import Part
from flows.warmstart import initial_model
from infra.compute.pools import cluster, connect, free_port, slots, wait_for_slots
from infra.compute.signals import announce_stop
from infra.proxy.client import ControlClient
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from infra.tracking.run import Tracker
from rl.config.load import dumps
from rl.config.run import RunConfig
from rl.errors import DeadlineExceeded, RollmillError
from rl.placement import HardwareClass, placement_of, preflight
from tasks.admit import admit
from tasks.interact import interact
from tasks.reset import reset
from tasks.runtime import install
from tasks.score import score
from tasks.serve import serve_engine
from tasks.step import train_process

PERIOD_S = 0.2


@flow(name="train", flow_run_name="train {name}", validate_parameters=False, persist_result=False)
def train(name: str, config: RunConfig, resume: bool = False, console: Console | None = None) -> Report:
    """Train one run to its last version. `name` is for people; the run is `config`."""
    started = monotonic()
    console = console or Console()
    work_dir = Home.default().run(config)
    log = open_run(config, resume)
    with ExitStack() as stack:
        address = stack.enter_context(cluster(config.pools, config.deadlines.start))
        client = stack.enter_context(connect(address, config.deadlines.start))
        check_placement(config, client)
        run = Run(config, log, client, address, work_dir, console)
        stack.enter_context(run.ended_with_flow())
        run.prepare_model()
        run.train()
    report = write_report(config, log.store, work_dir, "train", monotonic() - started)
    _publish(config, report)
    return report


def check_placement(config: RunConfig, client: Client) -> None:
    """Every class has workers and every stage a class. Raises DeadlineExceeded, PlacementError."""
    stages = (reset, interact, score, admit, train_process)
    engine = HardwareClass(config.engine.hardware)
    needed = {placement_of(stage).preferred() for stage in stages if not placement_of(stage).by_domain} | {engine}
    found = wait_for_slots(client, needed - {HardwareClass.LAMBDA}, config.deadlines.start)
    preflight(stages, [d.name for d in config.domains], found)


class Run:
    """What the flow holds while the run goes on."""

    def __init__(
        self,
        config: RunConfig,
        log: CommitLog,
        client: Client,
        address: str,
        work_dir: Path,
        console: Console,
    ):
        self._config, self._log, self._client, self._address = config, log, client, address
        self._store: ObjectStore = log.store
        self._work_dir, self._console = work_dir, console
        self._config_file = work_dir / "config.json"
        self._config_file.parent.mkdir(parents=True, exist_ok=True)
        self._config_file.write_text(dumps(config))
        self._proxy_url = f"http://127.0.0.1:{free_port()}"
        self._run = install(client, config, self._proxy_url, Home.default().cache)
        self._proxy = ControlClient(self._proxy_url, deadline_s=config.deadlines.control)
        self._parts: list[Part] = []
        self._serving: Future | None = None

    @contextmanager
    def ended_with_flow(self) -> Iterator[None]:
        announce_stop(self._client, self._run, False)
        try:
            yield
        finally:
            announce_stop(self._client, self._run)
            for part in self._parts:
                part.stop()

    def prepare_model(self) -> None:
        """The base in the store, warm-started if the configuration says so; once per run."""
        if not has_base(self._config, self._store):
            self._say("preparing the initial model")
            push_base(
                self._config,
                self._store,
                initial_model(self._config, self._client, self._run, self._work_dir, self._console),
            )

    def train(self) -> None:
        """From version 0 to the last one."""
        steps, deadlines = self._config.training.steps, self._config.deadlines
        learn = self._start("learn", self._config.restarts.trainer)
        self._start_engine()
        self._wait_until_serving(learn)
        if self._log.sync().head == 0:
            self._evaluate(0)
        if self._log.ledger.head < steps:
            rollout = self._start("rollout", self._config.restarts.rollout)
            with Progress(self._config, self._log, self._proxy, self._client, self._console) as progress:
                while (self._log.sync().head or 0) < steps:
                    for part in (learn, rollout):
                        part.check(self._console)
                    self._check_engine()
                    progress.refresh()
                    sleep(PERIOD_S)
        learn.finish(deadlines.batch)
        self._serve_last(steps)
        self._evaluate(steps)

    def _start_engine(self) -> None:
        """The engine with its proxy; it serves as soon as the log names a version."""
        where = placement_of(serve_engine).resolve(None, slots(self._client))
        port = int(self._proxy_url.rsplit(":", 1)[1])
        self._serving = self._client.submit(
            serve_engine,
            self._run,
            dumps(self._config),
            "127.0.0.1",
            port,
            resources={where.value: 1},
            pure=False,
            key=f"serve-{uuid.uuid4().hex[:8]}",
        )

    def _wait_until_serving(self, learn: Part) -> None:
        """Until the trainer committed a version and the engine serves one."""
        deadline_s = self._config.deadlines.start
        end = monotonic() + deadline_s
        while True:
            learn.check(self._console)
            self._check_engine()
            try:
                if self._proxy.status(deadline_s=1.0).serving is not None:
                    return
                missing = "the trainer committed no version"
            except RollmillError as error:
                missing = str(error)
            if monotonic() > end:
                raise DeadlineExceeded(f"no version is served within deadlines.start ({deadline_s:g} s): {missing}")
            sleep(PERIOD_S)

    def _serve_last(self, version: int) -> None:
        """Bring the engines to the last version, which no further step would do."""
        ledger = self._log.sync()
        if self._proxy.status().serving != version:
            control = ControlClient(self._proxy_url, deadline_s=self._config.deadlines.control, fence=ledger.fence)
            control.suspend()
            try:
                control.update(version, oldest_viable=version)
            finally:
                control.resume()

    def _evaluate(self, version: int) -> None:
        for result in evaluate(self._config, self._store, self._client, self._run, version):
            self._say(
                f"held-out {result.domain} at version {version}: {result.reward:.3f} over {result.problems} problems"
            )

    def _start(self, name: str, restarts: int) -> Part:
        module = [f"flows.{name}", str(self._config_file), self._address, self._proxy_url]
        part = Part(name, module, self._work_dir / "logs" / f"{name}.log", restarts)
        self._parts.append(part)
        return part

    def _check_engine(self) -> None:
        if self._serving is not None and self._serving.done():
            self._serving.result()
            raise RollmillError("engine: it ended before the run did")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False)


def _publish(config: RunConfig, report: Report) -> None:
    """The report's pictures and table, to MLflow and as Prefect artifacts."""
    from prefect.artifacts import create_markdown_artifact

    tracker = Tracker.start(config, "report")
    for path in (report.reward_png, report.timeline_png, report.json_path):
        tracker.log_artifact(path)
    tracker.close(config.deadlines.control)
    rows = "\n".join(f"| {name} | {value:.4g} |" for name, value in report.figures.items())
    create_markdown_artifact(
        f"# {config.tenant}/{config.name}\n\n| figure | value |\n|---|---|\n{rows}\n\n```\n{report.table}\n```\n",
        key=f"report-{config.tenant}-{config.name}".replace("_", "-").lower(),
        description="what the run learned",
    )
