"""How a trainer takes a run over, and what it needs to lead it.

    fence -> version 0, if there is none -> the newest full checkpoint -> replay what came after -> steps

Invariants: a fence invalidates no sample; whatever the moment at which the trainer before died, this goes on from the
log.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from infra.proxy.client import ControlClient
from infra.store.buffer import SampleBuffer
from infra.store.directories import pull_directory
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from infra.tracking.run import Tracker
from infra.training.leader import Leader
from infra.training.publish import Checkpoints, Publisher
from infra.training.snapshot import Snapshot
from infra.training.swap import Engines
from rl.config.run import RunConfig
from rl.protocol import StepProtocol
from rl.records import StateRef, Step

log = logging.getLogger(__name__)

TRAINER = "trainer-"
"""How the names of those begin who write to a log as trainers."""


def writer() -> str:
    """The name of this process."""
    return f"{TRAINER}{socket.gethostname()}-{os.getpid()}"


class Takeover:
    """One run, fenced. What is pulled from the store lies below `cache`."""

    def __init__(self, config: RunConfig, store: ObjectStore, cache: Path) -> None:
        """Raises Fenced, LogCorrupt or a StoreError."""
        self.config, self.store, self._cache = config, store, cache
        self.commits = CommitLog(store, config.prefix, writer())
        self.buffer = SampleBuffer(store, config.prefix)
        self.fence = self.commits.fence()
        self.version = self.commits.ledger.newest_full
        """What is built on; None when version 0 is yet to be made."""
        self.replay: list[Step] = [] if self.version is None else self.commits.steps_after(self.version)

    @property
    def steps(self) -> int:
        """Optimizer steps to make, replayed ones included."""
        done = max(1, self.commits.ledger.next_version)
        return len(self.replay) + max(0, self.config.training.steps + 1 - done)

    def restore(self) -> Path | None:
        """The state directory of `version`."""
        return None if self.version is None else self.pull(self.commits.ledger.states[self.version])

    def pull(self, ref: StateRef) -> Path:
        """A state directory of this run, verified. From any thread."""
        return pull_directory(self.store, self.config.prefix + ref.prefix, ref.manifest_sha256, self._cache)

    def initialise(self, checkpoints: Checkpoints, snapshot: Snapshot, model: torch.nn.Module | None = None) -> None:
        """Commit version 0: the base, or a zero adapter on it."""
        ref = checkpoints.push(snapshot, model, self.commits.state_prefix())
        self.commits.append_step(state=ref, weights_sha256=snapshot.sha256, alpha=self.config.policy.alpha)
        self.version = 0
        log.info("%sversion 0 committed", self.config.prefix)

    def appoint(
        self,
        checkpoints: Checkpoints,
        proxy_url: str,
        key: str | None,
        stack: ExitStack,
        pause: Callable[[float], object] = time.sleep,
    ) -> Leader:
        """Who leads it from here on, with all that ends with `stack`."""
        config, deadlines = self.config, self.config.deadlines
        seconds, load_s = deadlines.control, deadlines.load
        control = ControlClient(proxy_url, deadline_s=seconds, fence=self.fence, key=key, load_s=load_s)
        stack.enter_context(closing(control))
        tracker = Tracker.start(config, "trainer")
        stack.callback(tracker.close, deadlines.control)
        tracker.watch_system()
        engines = Engines(control, deadlines.control, deadlines.start)
        protocol = StepProtocol(config.staleness.alpha, config.mode.eager)
        publisher = stack.enter_context(
            closing(Publisher(config, self.commits, checkpoints, engines, tracker, protocol))
        )
        return Leader(config, self.commits, self.buffer, publisher, self.replay, pause)
