"""The driver of the training steps: rank 0 leads, the other ranks follow.

    alpha >= 1   get_batch -> suspend, update, resume -> train -> commit -> prefetch
    alpha == 0   suspend, update, resume -> get_batch -> train -> commit

`Leader` has everything that only rank 0 may touch: log, buffer, engines, tracker. `Feed` is what each rank's
trainer sees; it carries the leader's batches, and its failures, to the followers as JSON and Parquet.

Invariants
- A version is published by its record, which is written after its state is complete in the store.
- A replayed step trains the logged batch in the logged order and must reproduce the record's hash; it commits
  nothing and touches no engine.
- After a failure of rank 0 the followers are told and end too; nothing is committed any more.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from infra.compute.lifeline import CRASHED, DONE, FENCED, NAMED
from infra.store import schema
from infra.store.buffer import SampleBuffer
from infra.store.directories import push_directory
from infra.store.errors import Overtaken
from infra.store.log import CommitLog
from infra.training import metrics, ranks, state
from infra.training.batches import Batch, Batches, Limits
from infra.training.grpo import Trainer
from infra.training.swap import Engines
from infra.training.window import Window, rows_of
from rl.advantages.registry import advantage_function
from rl.config.run import RunConfig
from rl.errors import Fenced, RollmillError
from rl.protocol import Phase, StepProtocol
from rl.records import StateRef, Step

log = logging.getLogger(__name__)


class ReplayDiverged(RollmillError):
    """A logged step, trained again, gave other weights: software, hardware or samples are not the same."""


class TrainingDiverged(RollmillError):
    """The gradient is not a finite number; the weights are spoilt and were not committed."""


class Stopped(Exception):
    """Rank 0 ended with this exit code; it has told why."""

    def __init__(self, code: int) -> None:
        super().__init__(f"rank 0 ended with code {code}")
        self.code = code


class Tracker(Protocol):
    """Where figures go (`infra.tracking.run.Tracker`). Never blocks, never fails a step."""

    def log_step(self, step: int, metrics: dict[str, float]) -> None: ...

    def log_version(self, version: int, state: StateRef, metrics: dict[str, float], lsn: int) -> None: ...


def exit_code(error: BaseException) -> int:
    if isinstance(error, Fenced):
        return FENCED
    if isinstance(error, Overtaken):  # nothing is wrong: what was trained is discarded, and another start goes on
        return CRASHED
    return NAMED if isinstance(error, RollmillError) else CRASHED


class Checkpoints:
    """Writes a version's state to the store."""

    def __init__(self, config: RunConfig, commits: CommitLog, base: Path, work_dir: Path) -> None:
        self._config, self._commits, self._base, self._work_dir = config, commits, base, work_dir

    def push(self, version: int, trainer: Trainer, full: bool) -> StateRef:
        """Complete in the store when this returns; nothing names it yet."""
        draft = self._work_dir / f"draft-{version}"
        shutil.rmtree(draft, ignore_errors=True)
        model = trainer.accelerator.unwrap_model(trainer.model)
        state.save_model(model, self._base, draft / "model")
        if full:
            optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            state.save_trainer(draft / "trainer", version, model, optimizer, trainer.lr_scheduler)
        prefix = self._commits.state_prefix()
        manifest = push_directory(self._commits.store, self._config.prefix + prefix, draft)
        shutil.rmtree(draft)
        return StateRef(prefix=prefix, manifest_sha256=manifest, full=full)


class Leader:
    """Rank 0: one object per fence. `replay` are the steps since the restored checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        commits: CommitLog,
        buffer: SampleBuffer,
        engines: Engines,
        checkpoints: Checkpoints,
        tracker: Tracker,
        replay: Sequence[Step] = (),
    ) -> None:
        self._config, self._commits, self._buffer, self._engines = config, commits, buffer, engines
        self._checkpoints, self._tracker = checkpoints, tracker
        self._replay = deque(replay)
        self._batches = Batches(commits, buffer, config.policy, config.drops, config.stream, Limits.of(config))
        self._protocol = StepProtocol(config.staleness.alpha)
        self._clock = metrics.Clock()
        self._batch: Batch | None = None

    # -- before the optimizer ------------------------------------------------------------------------

    def next_batch(self) -> Batch:
        """Everything up to TRAIN."""
        if self._replay:
            step = self._replay[0]
            assert step.base is not None
            log.info("replaying version %d", step.version)
            return Batch(step.base, step.version, self._buffer.fetch(step), list(step.segments), [], [])
        self._clock = metrics.Clock()
        if self._config.staleness.alpha == 0:
            self._swap()
            self._batch = self._get_batch()
        else:
            self._batch = self._get_batch()
            self._swap()
        self._protocol.enter(Phase.TRAIN)
        self._clock.start("train")
        return self._batch

    def _get_batch(self) -> Batch:
        self._protocol.enter(Phase.GET_BATCH)
        with self._clock.span("wait"):
            return self._batches.next()

    def _swap(self) -> None:
        """The engines get the head: under alpha >= 1 what the previous step committed."""
        ledger = self._commits.sync()
        assert ledger.head is not None
        ahead = min(1, self._config.staleness.alpha)
        oldest = self._config.policy.oldest_viable(ledger, base_ahead=ahead)
        with self._clock.span("swap"):
            self._engines.swap(self._protocol, ledger.head, oldest)

    # -- after the optimizer -------------------------------------------------------------------------

    def commit(self, trainer: Trainer, figures: dict[str, float]) -> None:
        """Publish the version and consume its samples; or, in a replay, prove that it is the one."""
        if not math.isfinite(figures["grad_norm"]):
            raise TrainingDiverged(
                f"the gradient's norm is {figures['grad_norm']} after {figures['tokens']:.0f} tokens (loss "
                f"{figures['loss']}); lower training.learning_rate or training.max_grad_norm, or look at the rewards"
            )
        weights = state.weights_sha256(trainer.accelerator.unwrap_model(trainer.model))
        if self._replay:
            return self._verify(self._replay.popleft(), weights)
        batch = self._batch
        assert batch is not None
        self._clock.stop("train")
        self._protocol.enter(Phase.COMMIT)
        training = self._config.training
        full = batch.version % training.checkpoint_every == 0 or batch.version >= training.steps
        with self._clock.span("push"):
            ref = self._checkpoints.push(batch.version, trainer, full)
        dropped = [*batch.dropped, *self._batches.late(batch)]
        summary = self._summary(batch, dropped, figures)
        step = self._commits.append_step(
            state=ref,
            weights_sha256=weights,
            alpha=self._config.staleness.alpha,
            trained=batch.uids,
            segments=batch.segments,
            dropped=dropped,
            metrics=summary,
        )
        log.info("version %d: reward %.3f, lag %.2f", step.version, summary["reward"], summary["lag_mean"])
        self._tracker.log_step(step.version, summary)
        self._tracker.log_version(step.version, ref, summary, step.lsn)
        if self._config.staleness.alpha > 0:
            self._engines.prefetch(step.version)

    def _summary(self, batch: Batch, dropped: list, figures: dict[str, float]) -> dict[str, float]:
        spent = self._clock.figures()
        found = metrics.of_batch(batch, dropped, self._batches.report()) | figures | spent
        whole = sum(spent.get(f"{phase}_s", 0.0) for phase in metrics.PHASES)
        return metrics.finite(found | {"tokens_per_s": figures["tokens"] / whole if whole else 0.0})

    def _verify(self, step: Step, weights: str) -> None:
        if weights != step.weights_sha256:
            raise ReplayDiverged(
                f"version {step.version}, trained again from the log, has weights {weights[:12]}, but record "
                f"{step.lsn} says {step.weights_sha256[:12]}; the replay needs the same packages, machine type, "
                f"torch threads and number of processes as the first run"
            )


class Feed:
    """The source of windows of one rank's trainer; `leader` on rank 0 only. Set `trainer` before training."""

    def __init__(self, config: RunConfig, leader: Leader | None, device: torch.device | str = "cpu") -> None:
        self._config, self.leader, self._device = config, leader, device
        self._advantages = advantage_function(config.training.advantage)
        self._told = False
        self.trainer: Trainer | None = None

    def next_window(self) -> Window:
        if self.leader is None:
            return self._window(*_open(ranks.broadcast(None, self._device)))
        try:
            batch = self.leader.next_batch()
            header = {"base": batch.base, "version": batch.version}
            body = schema.encode(batch.groups) if ranks.world() > 1 else b""
        except BaseException as error:
            self._tell(exit_code(error))
            raise
        ranks.broadcast(_sealed(header, body), self._device)
        return Window(batch.version, rows_of(batch.groups, self._advantages, batch.base))

    def _window(self, header: dict[str, Any], body: bytes) -> Window:
        if "stop" in header:
            self._told = True
            raise Stopped(header["stop"])
        return Window(header["version"], rows_of(schema.decode(body), self._advantages, header["base"]))

    def finish_step(self, figures: dict[str, float]) -> None:
        if self.leader is None:
            return
        assert self.trainer is not None
        try:
            self.leader.commit(self.trainer, figures)
        except BaseException as error:
            self._tell(exit_code(error))
            raise

    def close(self) -> None:
        """After the last step: followers learn whether it was committed. Raises Stopped on them if not."""
        if self.leader is not None:
            self._tell(DONE)
        elif not self._told:
            header, _ = _open(ranks.broadcast(None, self._device))
            if header["stop"] != DONE:
                raise Stopped(header["stop"])

    def _tell(self, code: int) -> None:
        """Once: exactly one message answers the followers' last wait."""
        if not self._told:
            self._told = True
            ranks.broadcast(_sealed({"stop": code}, b""), self._device)


def _sealed(header: dict[str, Any], body: bytes) -> bytes:
    return json.dumps(header).encode() + b"\n" + body


def _open(message: bytes) -> tuple[dict[str, Any], bytes]:
    header, _, body = message.partition(b"\n")
    return json.loads(header), body
