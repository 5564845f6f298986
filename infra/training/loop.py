"""The driver of the training steps of one run: rank 0 leads, the other ranks follow.

`Leader` (`infra.training.leader`) has everything that only rank 0 may touch: log, buffer, publisher. `Feed` is what
each rank's trainer sees; it carries the leader's batches, and its failures, to the followers as JSON and Parquet.

Invariants
- After a failure of rank 0 the followers are told and end too; nothing is committed any more.
- However long rank 0 waits for a batch, the followers hear from it every `BEAT_S`: they wait for no single message
  longer than for the slowest step.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch

from infra.compute.lifeline import CRASHED, DONE, FENCED, NAMED
from infra.store import schema
from infra.store.errors import Overtaken
from infra.training import ranks
from infra.training.grpo import Trainer
from infra.training.leader import Leader
from infra.training.snapshot import Snapshot, Snapshots
from infra.training.window import Window, rows_of
from rl.advantages.registry import advantage_function
from rl.config.run import RunConfig
from rl.errors import Fenced, RollmillError

BEAT_S = 60.0
"""Far below what a follower waits for a message at most (`infra.training.main.SLACK_S`)."""


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


class Feed:
    """The source of windows of one rank's trainer; `leader` on rank 0 only. Set `trainer` before training."""

    def __init__(self, config: RunConfig, leader: Leader | None, device: torch.device | str = "cpu") -> None:
        self._config, self.leader, self._device = config, leader, device
        self._advantages = advantage_function(config.training.advantage)
        self._snapshots, self._version = Snapshots(), 0
        self._told, self._heard = False, 0.0
        self.trainer: Trainer | None = None

    def next_window(self) -> Window:
        if self.leader is None:
            return self._window(*_open(ranks.broadcast(None, self._device)))
        self._heard = time.monotonic()
        try:
            batch = self.leader.next_batch()
            header = {"base": batch.base, "version": batch.version}
            body = schema.encode(batch.groups) if ranks.world() > 1 else b""
            self._version = batch.version
            self.leader.begin()
        except BaseException as error:
            self._tell(exit_code(error))
            raise
        ranks.broadcast(_sealed(header, body), self._device)
        return Window(batch.version, rows_of(batch.groups, self._advantages, batch.base))

    def pause(self, seconds: float) -> None:
        """Between two looks of the leader for a batch: the followers are told that it looks still."""
        time.sleep(seconds)
        if ranks.world() > 1 and time.monotonic() - self._heard >= BEAT_S:
            self._heard = time.monotonic()
            ranks.broadcast(_sealed({"wait": True}, b""), self._device)

    def _window(self, header: dict[str, Any], body: bytes) -> Window:
        while "wait" in header:
            header, body = _open(ranks.broadcast(None, self._device))
        if "stop" in header:
            self._told = True
            raise Stopped(header["stop"])
        return Window(header["version"], rows_of(schema.decode(body), self._advantages, header["base"]))

    def finish_step(self, figures: dict[str, float]) -> None:
        if self.leader is None:
            return
        assert self.trainer is not None
        try:
            self.leader.end()
            self.leader.commit(figures, self._take, self.trainer.accelerator.unwrap_model(self.trainer.model))
        except BaseException as error:
            self._tell(exit_code(error))
            raise

    def _take(self, full: bool) -> Snapshot:
        trainer = self.trainer
        assert trainer is not None
        model = trainer.accelerator.unwrap_model(trainer.model)
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        return self._snapshots.take(self._version, model, optimizer, trainer.lr_scheduler, full)

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
