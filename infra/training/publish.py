"""Publishing versions: beside the training of the next step under alpha >= 1, in line under alpha = 0.

    trainer    train n | submit n | get_batch n+1 ........ | engines | train n+1 ........ | wait, submit n+1
    publisher          | save n -> push n -> record n -> prefetch n | suspend, update n, resume |
    (eager)            | save n -> push n -> record n -> prefetch n -> suspend, update n, resume |

A version is a copy in host memory (`infra.training.snapshot`), made in `submit`, which is all that training waits for.
The publisher is one thread that does one thing after another. The trainer hands it

- `submit`: a version, once the one before is published and the engines have it; until then the trainer waits.
- `engines`: the next batch is in hand, so the engines may take the newest version as soon as it is committed. In a mode
  with the eager order (`rl.modes`) they take every version by themselves, and this is called once, at the beginning.

The commit log belongs to one thread at a time: to the publisher from `submit` until the record stands, then to the
trainer again. Meanwhile the trainer selects its next batch by the `projected` ledger, in which the record stands
already, and writes nothing: what it finds to drop without a batch, it finds again afterwards.

Invariants
- Everything that a record names exists before the record; engines get no version before its record.
- Versions are published one by one, in order. After a failure, here or of the trainer, nothing is committed any more;
  the failure is raised in the trainer by the next call of `projected`, `submit` or `wait`.
- A crash loses nothing: a version without record never was, and its samples are open.
"""

from __future__ import annotations

import logging
import queue
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from infra.store.log import CommitLog
from infra.store.weights import WeightStore
from infra.training import metrics, state
from infra.training.batches import Batch
from infra.training.snapshot import Snapshot
from infra.training.swap import Engines
from rl.config.run import RunConfig
from rl.errors import DeadlineExceeded
from rl.ledger import Ledger
from rl.protocol import Phase, StepProtocol
from rl.records import Drop, StateRef, Step

log = logging.getLogger(__name__)

CLOSE_S = 15.0
"""How long an ending trainer waits for what the publisher is doing."""


class PublishTimeout(DeadlineExceeded):
    """A version was not published before the deadline."""


class Tracker(Protocol):
    """Where figures go (`infra.tracking.run.Tracker`). Never blocks, never fails a step."""

    def log_step(self, step: int, metrics: dict[str, float]) -> None: ...

    def log_version(self, version: int, state: StateRef, metrics: dict[str, float], lsn: int) -> None: ...


class Checkpoints:
    """Writes a version's state to the store."""

    def __init__(self, config: RunConfig, weights: WeightStore, base: Path, work_dir: Path) -> None:
        self._config, self._weights, self._base, self._work_dir = config, weights, base, work_dir

    def push(self, snapshot: Snapshot, model: torch.nn.Module | None, prefix: str) -> StateRef:
        """Complete in the store when this returns; nothing names it yet. `model` as in `state.save`."""
        draft = self._work_dir / f"draft-{snapshot.version}"
        shutil.rmtree(draft, ignore_errors=True)
        state.save(snapshot, model, self._base, draft, self._config.weights.bucket_mb)
        manifest = self._weights.push(self._config.prefix + prefix, draft)
        shutil.rmtree(draft)
        return StateRef(prefix=prefix, manifest_sha256=manifest, full=snapshot.full)


@dataclass(frozen=True)
class Version:
    """What the optimizer made, before it is committed."""

    snapshot: Snapshot
    model: torch.nn.Module | None
    """Gives names and configuration, where it is a whole model; its tensors have moved on."""
    batch: Batch
    dropped: list[Drop]
    figures: dict[str, float]
    clock: metrics.Clock
    """Of its step."""


class Publisher:
    """All methods are the trainer's thread's. Close it, whatever happened."""

    def __init__(
        self,
        config: RunConfig,
        commits: CommitLog,
        checkpoints: Checkpoints,
        engines: Engines,
        tracker: Tracker,
        protocol: StepProtocol,
    ) -> None:
        self._config, self._commits, self._checkpoints = config, commits, checkpoints
        self._engines, self._tracker, self.protocol = engines, tracker, protocol
        self._mode = config.mode
        self._last_swap: dict[str, float] = {}
        """Of the eager order: figures of the swap that followed the last record, for the next one."""
        self._reached: tuple[int, int] | None = None
        self._projected: Ledger | None = None
        self._committed = threading.Event()
        self._jobs: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._pending: list[Future[None]] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
        self._thread.start()

    # -- the trainer's side --------------------------------------------------------------------------

    @property
    def projected(self) -> Ledger | None:
        """The ledger as it will be when the version on its way is committed; None when none is: read the log."""
        for job in self._pending:
            if job.done():
                job.result()
        if self._committed.is_set():
            self._projected = None
        return self._projected

    def submit(self, version: Version) -> None:
        """Publish a version. `wait` first: the log is needed to complete it. Under alpha = 0 it is published when
        this returns."""
        prefix = self._commits.state_prefix()
        self._projected = project(self._commits.ledger, version, prefix, self._config.policy.alpha)
        self._committed.clear()
        self._do(lambda: self._publish(version, prefix))
        if self._mode.alternates:
            self.wait()

    def engines(self, clock: metrics.Clock) -> None:
        """The engines may take the head, or the version on its way once it is. Under alpha = 0 they have it when this
        returns. Raises Fenced, or what ended the publisher."""
        head = None if self.projected is not None else self._target(self._commits.sync())
        self._do(lambda: self._swap(head, clock))
        if self._mode.alternates:
            self.wait()

    def wait(self) -> None:
        """Until all is done that was asked for, and the log is the trainer's. Raises PublishTimeout, or what ended
        the publisher."""
        deadline_s = self._config.deadlines.publish
        try:
            for job in self._pending:
                job.result(timeout=deadline_s)
        except TimeoutError:
            raise PublishTimeout(
                f"version {self._commits.ledger.next_version} was not published within deadlines.publish "
                f"({deadline_s:g} s): the store or the engines are too slow, or hang; raise it if they are just slow"
            ) from None
        self._pending.clear()
        self._projected = None

    def stop(self) -> None:
        """Begin nothing new. A version on its way may still be committed, or not. From any thread."""
        self._stopped = True
        self._engines.stop()

    def close(self) -> None:
        """The same, and end."""
        self.stop()
        self._jobs.put(None)
        self._thread.join(CLOSE_S)

    # -- the publisher's thread ----------------------------------------------------------------------

    def _do(self, call: Callable[[], None]) -> None:
        done: Future[None] = Future()
        self._pending.append(done)
        self._jobs.put((done, call))

    def _work(self) -> None:
        failure: BaseException | None = None
        while (job := self._jobs.get()) is not None:
            done, call = job
            try:
                if failure is None and not self._stopped:
                    call()
            except BaseException as error:
                failure = error
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)

    def _publish(self, version: Version, prefix: str) -> None:
        batch, clock, alpha = version.batch, version.clock, self._config.policy.alpha
        with clock.span("push"):
            ref = self._checkpoints.push(version.snapshot, version.model, prefix)
            sha256 = version.snapshot.sha256
        speed = {"tokens_per_s": version.figures["tokens"] / clock.whole}
        summary = metrics.finite(version.figures | self._last_swap | clock.figures() | speed)
        if self._stopped:
            return
        step = self._commits.append_step(
            state=ref,
            weights_sha256=sha256,
            alpha=alpha,
            trained=batch.uids,
            segments=batch.segments,
            dropped=version.dropped,
            metrics=summary,
        )
        self.protocol.enter(Phase.COMMIT)
        self._reached = self._target(self._commits.ledger)
        self._committed.set()  # from here on the log is the trainer's
        log.info("version %d: reward %.3f, lag %.2f", step.version, summary["reward"], summary["lag_mean"])
        self._tracker.log_step(step.version, summary)
        self._tracker.log_version(step.version, ref, summary, step.lsn)
        if not self._mode.alternates:
            self._engines.prefetch(step.version)
        if self._mode.eager:
            swap = metrics.Clock()
            self._swap(None, swap)
            self._last_swap = swap.spans()

    def _target(self, ledger: Ledger) -> tuple[int, int]:
        """The head, and the oldest start version that can still be trained when the engines have it."""
        assert ledger.head is not None
        ahead = self._mode.base_ahead(self._config.staleness.alpha)
        return ledger.head, self._config.policy.oldest_viable(ledger, base_ahead=ahead)

    def _swap(self, head: tuple[int, int] | None, clock: metrics.Clock) -> None:
        target = head or self._reached
        assert target is not None, "what was on its way is committed: else this job is not run"
        with clock.span("swap"):
            self._engines.swap(self.protocol, *target)


def project(ledger: Ledger, version: Version, prefix: str, alpha: int) -> Ledger:
    """A copy of the ledger in which the version's record stands. Raises LogCorrupt where it can not be committed."""
    after = Ledger.from_snapshot(ledger.lsn, ledger.snapshot())
    record = Step(
        lsn=ledger.lsn + 1,
        nonce="",
        writer="",
        time=0.0,
        version=version.snapshot.version,
        base=version.batch.base,
        state=StateRef(prefix=prefix, manifest_sha256="", full=version.snapshot.full),
        weights_sha256="",
        alpha=alpha,
        trained=tuple(map(str, version.batch.uids)),
        segments=tuple(version.batch.segments),
        dropped=tuple(version.dropped),
    )
    after.apply(record)
    return after
