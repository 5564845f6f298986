"""The tenants of a trainer in memory: one frozen base, and on it an adapter, an optimizer and a scheduler for each.

    update -> bring (make room, restore) -> train one window -> copy

A step of a tenant is TRL's `train` of one step on the tenant's own trainer (`infra.training.grpo`), so nothing of it is
done otherwise than in a run of its own.

Invariants
- What a step of a tenant makes is a function of its configuration, its last checkpoint and its batch: not of the other
  tenants, the order of their steps, nor of how often it left memory.
- There is nothing to write when a tenant leaves memory: every version is a full checkpoint in the store before the next
  step of the tenant begins, and is what it comes back from. What is in memory is used only if it is the very version
  that the step builds on.
- A step that fails leaves nothing of its tenant behind, and the others as they were.
- Everything happens on the thread that made the roster: torch's own settings are per thread.
"""

from __future__ import annotations

import gc
import shutil
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from infra.training import grpo, setup, state
from infra.training.adapters import Adapters, activate
from infra.training.snapshot import Snapshot, Snapshots
from infra.training.window import Window
from rl.config.run import RunConfig
from rl.errors import ProtocolViolation
from rl.residence import Residence


@dataclass
class Counts:
    """What happened to memory."""

    restores: int = 0
    evictions: int = 0


class Member:
    """One tenant in memory, at one version. TRL's trainer, which takes longer than an adapter, is made for its first
    step: by then others roll out."""

    def __init__(
        self, config: RunConfig, adapters: Adapters, base: Path, work_dir: Path, version: int, saved: Path | None
    ) -> None:
        """`saved` is the state directory of `version`; None makes the adapter of version 0."""
        self.version = version
        self._config, self._base, self._work_dir = config, base, work_dir
        self._saved, self._snapshots = saved, Snapshots()
        self._window: Window | None = None
        self._figures: dict[str, float] = {}
        self._trainer: grpo.Trainer | None = None
        self._model = adapters.add(config)
        self.adapter = str(self._model.active_adapter)
        try:
            if saved is not None:
                state.load_weights(self._model, saved / "model")
        except BaseException:
            adapters.remove(self.adapter)
            raise

    def prepare(self) -> None:
        """For steps."""
        if self._trainer is None:
            activate(self._model, self.adapter)
            tokenizer = setup.load_tokenizer(self._base)
            settings = grpo.arguments(self._config, 1, self._work_dir, 60)
            self._trainer = grpo.Trainer(self._config, self._model, tokenizer, settings, self, self._load)

    def train(self, window: Window) -> dict[str, float]:
        """One optimizer step; the figures of its window. `prepare` first."""
        assert self._trainer is not None
        self._window = window
        self._trainer.train()
        self.version = window.version
        return self._figures

    def copy(self) -> Snapshot:
        """The version that it is at. Good until the next one."""
        activate(self._model, self.adapter)
        trainer = self._trainer
        if trainer is None:
            return self._snapshots.take(self.version, self._model)
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        return self._snapshots.take(self.version, self._model, optimizer, trainer.lr_scheduler)

    # -- what its trainer asks (`grpo.Source`, `grpo.StateLoader`) -------------------------------------

    def next_window(self) -> Window:
        assert self._window is not None
        return self._window

    def finish_step(self, figures: dict[str, float]) -> None:
        self._figures = figures

    def _load(self, optimizer: Optimizer, scheduler: LRScheduler) -> None:
        if self._saved is not None:
            state.load_trainer(self._saved / "trainer", self.version, self._model, optimizer, scheduler)


class Roster:
    """The members, by the prefix of their runs; at most `most` at once."""

    def __init__(
        self, base: Path, dtype: str, most: int, work_dir: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._base, self._most, self._work_dir, self._clock = base, most, work_dir, clock
        self._adapters = Adapters(setup.load_model(base, dtype))
        self._members: dict[str, Member] = {}
        self._residence = Residence()
        self._thread = threading.get_ident()
        self.counts = Counts()
        gc.collect()
        gc.freeze()  # what is here for good need not be looked at when garbage is collected

    @property
    def base_sha256(self) -> str:
        return self._adapters.base_sha256

    @property
    def resident(self) -> list[str]:
        """From any thread."""
        return list(self._members)

    def holds(self, key: str, version: int) -> bool:
        """Whether a step on this version needs no restoring, as of now. From any thread."""
        member = self._members.get(key)
        return member is not None and member.version == version

    def begin(self, config: RunConfig, waiting: Collection[str] = ()) -> Snapshot:
        """Version 0 of a tenant. Raises AdapterUnusable."""
        self._check_thread()
        return self._enter(config, 0, None, waiting).copy()

    def bring(
        self, config: RunConfig, version: int, fetch: Callable[[], Path], waiting: Collection[str] = ()
    ) -> Member:
        """The tenant at `version`, restored from the state directory that `fetch` gives unless it is here. `waiting`
        are the keys of those who will be next."""
        self._check_thread()
        if self.holds(config.prefix, version):
            member = self._members[config.prefix]
        else:
            saved = fetch()
            self.counts.restores += 1
            member = self._enter(config, version, saved, waiting)
        try:
            member.prepare()
        except BaseException:
            self.forget(config.prefix)
            raise
        return member

    def update(self, config: RunConfig, member: Member, window: Window) -> tuple[dict[str, float], Snapshot]:
        """One step of a tenant: its figures, and the version that it made. Whatever it raises, the tenant is not here
        any more then."""
        self._check_thread()
        try:
            figures = member.train(window)
            snapshot = member.copy()
        except BaseException:
            self.forget(config.prefix)
            raise
        self._residence.used(config.prefix, self._clock())
        return figures, snapshot

    def forget(self, key: str) -> None:
        """Let a tenant go that is done, failed or somebody else's now. Nothing happens for one that is not here."""
        self._check_thread()
        self._leave(key)
        self._residence.forget(key)

    def _enter(self, config: RunConfig, version: int, saved: Path | None, waiting: Collection[str]) -> Member:
        key = config.prefix
        self._leave(key)
        while len(self._members) >= self._most:
            self._leave(self._residence.victim(list(self._members), waiting, self._clock()))
            self.counts.evictions += 1
        work_dir = self._work_dir / key.replace("/", ".")
        member = Member(config, self._adapters, self._base, work_dir, version, saved)
        self._members[key] = member
        return member

    def _leave(self, key: str) -> None:
        member = self._members.pop(key, None)
        if member is not None:
            self._adapters.remove(member.adapter)
            shutil.rmtree(self._work_dir / key.replace("/", "."), ignore_errors=True)
            del member
            gc.collect()  # TRL's trainer is full of cycles, and holds the moments

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise ProtocolViolation("the roster belongs to the thread that made it: tenants' updates take turns there")
