"""Writes what happens to MLflow, behind the back of whoever reports it.

    caller -> bounded queue -> one thread -> MLflow server        (full queue: dropped, counted, said once)

Invariants
- No call here blocks on the network or raises for it; a server that is away costs metrics, never a step.
- A projection of the commit log: `rebuild(records)` logs what is missing, and nothing twice.
- One MLflow run per tenant and run name, found by the tag `rollmill.run`: a resumed run goes on in it, and all
  roles write to it.
- Of `tracking.traces` of the problems one trajectory is a trace of the run (`infra.tracking.traces`).
- A policy version is one logged model and one model version of the registered model `{tenant}.{run}`, found by
  its tag `policy_version`. `models:/{tenant}.{run}/latest` is the newest (MLflow reserves the name `latest` and
  resolves it itself); the alias `head` is the head of the live line, also after a rollback.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, Full, Queue
from time import time
from typing import Literal

from infra.tracking.server import MlflowRun, Rejected
from rl.config.run import RunConfig
from rl.records import Record, Rollback, StateRef, Step
from rl.trajectory import Trajectory

log = logging.getLogger(__name__)

Role = Literal["trainer", "rollout", "evaluator", "report"]
QUEUE = 1000
BACKOFF_S = (0.5, 1.0, 2.0, 5.0)
"""Between two tries of one job; the last one repeats."""


class Tracker:
    """The tracking of one run, from one process. Make it with `start`; `close` it."""

    def __init__(self, run: MlflowRun | None) -> None:
        self._run = run
        self._jobs: Queue[tuple[str, tuple]] = Queue(QUEUE)
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        self.dropped = 0
        """Calls that will never reach MLflow."""
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        if run is not None:
            self._thread.start()

    @classmethod
    def start(cls, config: RunConfig, role: Role) -> Tracker:
        """A tracker for this process. Returns at once; without `tracking.enabled` its methods do nothing."""
        uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not config.tracking.enabled:
            return cls(None)
        if uri is None:
            log.warning("tracking is off: set tracking.uri or MLFLOW_TRACKING_URI, or tracking.enabled to false")
            return cls(None)
        return cls(MlflowRun(config, uri, owner=role == "trainer"))

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        """The figures of one step (keys as in `Step.metrics`), as one batch."""
        self._put("log_metrics", step, dict(metrics), time())

    def log_version(self, version: int, state: StateRef, metrics: dict[str, float], lsn: int | None = None) -> None:
        """A committed version, with what it was trained on. Idempotent. `lsn` of its record; without one the
        lsn that its state was written for."""
        lsn = int(state.prefix.split("/")[1].split("-")[0]) if lsn is None else lsn
        self._put("log_version", version, lsn, state, dict(metrics))
        self._put("set_head", version)

    def log_artifact(self, path: Path) -> None:
        """A file of the run, under its own name; read when its turn comes."""
        self._put("log_artifact", path)

    def tag(self, key: str, value: str) -> None:
        """Something to be seen with the run, and searched by; the newest value stays."""
        self._put("set_tag", key, value)

    def log_trace(self, trajectory: Trajectory) -> None:
        """A trajectory, as a trace of the run. Idempotent."""
        self._put("log_trace", trajectory)

    def watch_system(self) -> None:
        """Log what this machine does, until `close`; without `tracking.system_metrics` nothing."""
        self._put("watch_system")

    def rebuild(self, records: Iterable[Record]) -> None:
        """Log every step and version of the log that MLflow does not have: after a crash, or on a new server."""
        steps, head = [], None
        for record in records:
            if isinstance(record, Step):
                steps.append(record)
                head = record.version
            elif isinstance(record, Rollback):
                head = record.to
        self._put("rebuild", steps, head)

    def close(self, deadline_s: float) -> bool:
        """Write what is queued, for up to `deadline_s` seconds; whether all of it was written. Idempotent."""
        if self._run is None:
            return True
        if not self._closing.is_set():
            self._put("finish")
        self._closing.set()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            self._abandoned.set()
            self.dropped += self._jobs.qsize() + 1
            log.warning("MLflow did not take the last %d entries within %.0f s", self.dropped, deadline_s)
        return self.dropped == 0

    # -- the thread ----------------------------------------------------------------------------------

    def _put(self, method: str, *arguments: object) -> None:
        if self._run is None or self._closing.is_set():
            return
        try:
            self._jobs.put_nowait((method, arguments))
        except Full:
            self._drop("the queue to MLflow is full: the server does not answer, or not fast enough")

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if self.dropped == 1:
            log.warning("tracking: dropped an entry, further ones silently: %s", why)

    def _work(self) -> None:
        while not (self._closing.is_set() and self._jobs.empty()):
            try:
                method, arguments = self._jobs.get(timeout=0.2)
            except Empty:
                continue
            self._do(method, arguments)

    def _do(self, method: str, arguments: tuple) -> None:
        """One job, tried until it is done, refused for good, or abandoned."""
        assert self._run is not None
        tries = 0
        while not self._abandoned.is_set():
            try:
                getattr(self._run, method)(*arguments)
            except Rejected as error:
                return self._drop(str(error))
            except Exception as error:
                if tries == 0:
                    log.info("tracking: %s will be tried again: %s", method, error)
                self._abandoned.wait(BACKOFF_S[min(tries, len(BACKOFF_S) - 1)])
                tries += 1
            else:
                return
