"""The driver of the training steps: rank 0 leads, the other ranks follow.

    alpha >= 1   get_batch -> train -> publish, beside the next step: commit, prefetch, suspend, update, resume
    alpha == 0   suspend, update, resume -> get_batch -> train -> commit

Whether the update waits for the next batch is the mode's (`rl.modes`, `rl.protocol`).

`Leader` has everything that only rank 0 may touch: log, buffer, publisher. `Feed` is what each rank's trainer sees; it
carries the leader's batches, and its failures, to the followers as JSON and Parquet.

Invariants
- A version is published by its record, which is written after its state is complete in the store
  (`infra.training.publish`).
- A replayed step trains the logged batch in the logged order and must reproduce the record's hash; it commits
  nothing and touches no engine.
- After a failure of rank 0 the followers are told and end too; nothing is committed any more.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from infra.compute.lifeline import CRASHED, DONE, FENCED, NAMED
from infra.store import schema
from infra.store.buffer import SampleBuffer
from infra.store.errors import Overtaken
from infra.store.flights import Flights
from infra.store.log import CommitLog
from infra.training import metrics, ranks
from infra.training.batches import Batch, Batches, Limits
from infra.training.grpo import Trainer
from infra.training.publish import Publisher, Version
from infra.training.snapshot import Snapshots, trained, weights_sha256
from infra.training.window import Window, rows_of
from rl.advantages.registry import advantage_function
from rl.config.run import RunConfig
from rl.errors import Fenced, RollmillError
from rl.protocol import Phase
from rl.records import Step

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


def exit_code(error: BaseException) -> int:
    if isinstance(error, Fenced):
        return FENCED
    if isinstance(error, Overtaken):  # nothing is wrong: what was trained is discarded, and another start goes on
        return CRASHED
    return NAMED if isinstance(error, RollmillError) else CRASHED


class Leader:
    """Rank 0: one object per fence. `replay` are the steps since the restored checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        commits: CommitLog,
        buffer: SampleBuffer,
        publisher: Publisher,
        replay: Sequence[Step] = (),
    ) -> None:
        self._config, self._commits, self._buffer, self._publisher = config, commits, buffer, publisher
        self._replay = deque(replay)
        self._mode, self._begun = config.mode, False
        self._batches = Batches(
            commits,
            buffer,
            config.policy,
            config.drops,
            config.stream,
            Limits.of(config),
            Flights(commits.store, config.prefix).look if config.waits else dict,
        )
        self._snapshots = Snapshots()
        self._clock = metrics.Clock()
        self._batch: Batch | None = None

    # -- before the optimizer ------------------------------------------------------------------------

    def next_batch(self) -> Batch:
        """Everything up to TRAIN."""
        if self._replay:
            step = self._replay[0]
            assert step.base is not None
            log.info("replaying version %d", step.version)
            self._commits.sync()  # Fenced is the truth then: the samples may be deleted already
            return Batch(step.base, step.version, self._buffer.fetch(step), list(step.segments), [], [])
        self._clock = metrics.Clock()
        if self._mode.alternates or (self._mode.eager and not self._begun):
            self._publisher.engines(self._clock)
            if self._mode.eager:
                self._publisher.wait()
        self._begun = True
        self._batch = self._get_batch()
        if not (self._mode.alternates or self._mode.eager):
            self._publisher.engines(self._clock)
        self._publisher.protocol.enter(Phase.TRAIN)
        self._clock.start("train")
        return self._batch

    def _get_batch(self) -> Batch:
        self._publisher.protocol.enter(Phase.GET_BATCH)
        with self._clock.span("wait"):
            return self._batches.next(lambda: self._publisher.projected)

    # -- after the optimizer -------------------------------------------------------------------------

    def commit(self, trainer: Trainer, figures: dict[str, float]) -> None:
        """Publish the version and consume its samples; or, in a replay, prove that it is the one."""
        if not math.isfinite(figures["grad_norm"]):
            raise TrainingDiverged(
                f"the gradient's norm is {figures['grad_norm']} after {figures['tokens']:.0f} tokens (loss "
                f"{figures['loss']}); lower training.learning_rate or training.max_grad_norm, or look at the rewards"
            )
        model = trainer.accelerator.unwrap_model(trainer.model)
        if self._replay:
            return self._verify(self._replay.popleft(), weights_sha256(trained(model)))
        batch, clock, training = self._batch, self._clock, self._config.training
        assert batch is not None
        clock.stop("train")
        beside = not self._mode.alternates
        with clock.span("stall") if beside else nullcontext():
            self._publisher.wait()
            dropped = [*batch.dropped, *self._batches.late(batch)]
            full = batch.version % training.checkpoint_every == 0 or batch.version >= training.steps
            optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            snapshot = self._snapshots.take(batch.version, model, optimizer, trainer.lr_scheduler, full)
        found = metrics.of_batch(batch, dropped, self._batches.report()) | figures
        if beside:
            clock.close()
        self._publisher.submit(Version(snapshot, model, batch, dropped, found, clock))

    def finish(self) -> None:
        """After the last step: until it is published. Raises what ended the publisher."""
        self._publisher.wait()

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
        """After the last step: it is committed when this returns, and raises if not, Stopped on followers."""
        if self.leader is not None:
            try:
                self.leader.finish()
            except BaseException as error:
                self._tell(exit_code(error))
                raise
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
