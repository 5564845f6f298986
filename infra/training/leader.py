"""What one run's trainer does beside the optimizer: form batches, publish versions, replay.

    alpha >= 1   get_batch -> train -> publish, beside the next step: commit, prefetch, suspend, update, resume
    alpha == 0   suspend, update, resume -> get_batch -> train -> commit

Whether the update waits for the next batch is the mode's (`rl.modes`, `rl.protocol`). The optimizer is somebody else's:
rank 0 of a run of its own (`infra.training.loop`), or the one that many tenants share (`infra.training.desk`).

    next_batch -> (settle) -> begin -> optimizer -> end -> commit

Invariants
- A version is published by its record, which is written after its state is complete in the store
  (`infra.training.publish`).
- A replayed step trains the logged batch in the logged order and must reproduce the record's hash; it commits
  nothing and touches no engine.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from infra.store.buffer import SampleBuffer
from infra.store.flights import Flights
from infra.store.log import CommitLog
from infra.training import metrics
from infra.training.batches import Batch, Batches, Limits
from infra.training.publish import Publisher, Version
from infra.training.snapshot import Snapshot
from rl.config.run import RunConfig
from rl.errors import RollmillError
from rl.protocol import Phase
from rl.records import StateRef, Step

log = logging.getLogger(__name__)

Take = Callable[[bool], Snapshot]
"""Copies what the optimizer made; whole (see `Snapshot.full`) or the weights alone."""


class ReplayDiverged(RollmillError):
    """A logged step, trained again, gave other weights: software, hardware or samples are not the same."""


class TrainingDiverged(RollmillError):
    """The gradient is not a finite number; the weights are spoilt and were not committed."""


class Leader:
    """One object per fence. `replay` are the steps since the restored checkpoint. One thread's."""

    def __init__(
        self,
        config: RunConfig,
        commits: CommitLog,
        buffer: SampleBuffer,
        publisher: Publisher,
        replay: Sequence[Step] = (),
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """`pause` between two looks for a batch, see `Batches`."""
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
            pause=pause,
        )
        self.clock = metrics.Clock()
        """Of the step that is made."""
        self._batch: Batch | None = None

    # -- before the optimizer ------------------------------------------------------------------------

    def next_batch(self) -> Batch:
        """Everything up to TRAIN."""
        self.clock = metrics.Clock()
        if self._replay:
            step = self._replay[0]
            assert step.base is not None
            log.info("replaying version %d", step.version)
            self._commits.sync()  # Fenced is the truth then: the samples may be deleted already
            return Batch(step.base, step.version, self._buffer.fetch(step), list(step.segments), [], [])
        if self._mode.alternates or (self._mode.eager and not self._begun):
            self._publisher.engines(self.clock)
            if self._mode.eager:
                self._publisher.wait()
        self._begun = True
        self._batch = self._get_batch()
        if not (self._mode.alternates or self._mode.eager):
            self._publisher.engines(self.clock)
        return self._batch

    def _get_batch(self) -> Batch:
        self._publisher.protocol.enter(Phase.GET_BATCH)
        with self.clock.span("wait"):
            return self._batches.next(lambda: self._publisher.projected)

    def settle(self) -> StateRef:
        """Until the version that the batch builds on is published, which an optimizer wants that may have to restore
        it; where it lies."""
        self._publisher.wait()
        ledger = self._commits.ledger
        assert ledger.head is not None
        return ledger.states[ledger.head]

    def begin(self) -> None:
        """The optimizer begins."""
        if not self._replay:
            self._publisher.protocol.enter(Phase.TRAIN)
        self.clock.start("train")

    def end(self) -> None:
        """The optimizer has stepped."""
        self.clock.stop("train")

    # -- after the optimizer -------------------------------------------------------------------------

    def commit(self, figures: dict[str, float], take: Take, model: torch.nn.Module | None = None) -> None:
        """Publish the version and consume its samples; or, in a replay, prove that it is the one. `model` gives names
        and configuration, where a whole one is trained."""
        if not math.isfinite(figures["grad_norm"]):
            raise TrainingDiverged(
                f"the gradient's norm is {figures['grad_norm']} after {figures['tokens']:.0f} tokens (loss "
                f"{figures['loss']}); lower training.learning_rate or training.max_grad_norm, or look at the rewards"
            )
        if self._replay:
            return self._verify(self._replay.popleft(), take(False).sha256)
        batch, training = self._batch, self._config.training
        assert batch is not None
        beside = not self._mode.alternates
        with self.clock.span("stall") if beside else nullcontext():
            self._publisher.wait()
            dropped = [*batch.dropped, *self._batches.late(batch)]
            snapshot = take(batch.version % training.checkpoint_every == 0 or batch.version >= training.steps)
        found = metrics.of_batch(batch, dropped, self._batches.report()) | figures
        if beside:
            self.clock.close()
        self._publisher.submit(Version(snapshot, model, batch, dropped, found, self.clock))

    def finish(self) -> None:
        """After the last step: until it is published. Raises what ended the publisher."""
        self._publisher.wait()

    def stop(self) -> None:
        """Begin nothing new: the run is let go of. From any thread."""
        self._publisher.stop()

    def _verify(self, step: Step, weights: str) -> None:
        if weights != step.weights_sha256:
            raise ReplayDiverged(
                f"version {step.version}, trained again from the log, has weights {weights[:12]}, but record "
                f"{step.lsn} says {step.weights_sha256[:12]}; the replay needs the same packages, machine type, "
                f"torch threads and number of processes as the first run"
            )
