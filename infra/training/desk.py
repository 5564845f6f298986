"""One job at a tenants' trainer: a thread that does everything but the optimizer, which all jobs share.

    fence -> version 0 -> (next_batch -> turn: restore, train, copy -> commit) ... -> done

Invariants
- What goes wrong here is this job's: the thread ends with an outcome, and no other job notices.
- A job that is let go of commits nothing any more once its thread has ended; what was not committed is trained again,
  bit by bit, by whoever goes on with it.
- A job waits for its batch without a place in the trainer's memory.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from infra.proxy.client import NotServed, ProxyUnavailable
from infra.store.errors import Corrupt, NotFound, StoreError
from infra.store.objects import ObjectStore
from infra.store.reader import LogReader
from infra.store.weights import WeightStore
from infra.training.batches import Batch
from infra.training.bells import Bells
from infra.training.leader import Leader
from infra.training.publish import Checkpoints, PublishTimeout
from infra.training.roster import Roster
from infra.training.snapshot import Snapshot
from infra.training.swap import SwapTimeout
from infra.training.takeover import TRAINER, Takeover, writer
from infra.training.turns import LetGo, Turns
from infra.training.window import Window, rows_of
from rl.advantages.registry import advantage_function
from rl.config.run import RunConfig
from rl.errors import Fenced, RollmillError

T = TypeVar("T")

log = logging.getLogger(__name__)

INFRASTRUCTURE = (StoreError, ProxyUnavailable, NotServed, SwapTimeout, PublishTimeout, Fenced)
"""What says nothing about the job: it is tried again."""
OWN = Corrupt | NotFound
"""Of these, what another try does not mend."""
UNASKED_S = 3.0
"""Between two looks for a batch whose arrival nobody told."""


@dataclass(frozen=True)
class Shop:
    """What the desks of one trainer share."""

    store: ObjectStore
    weights: Callable[[], WeightStore]
    """The weight store of one job."""
    base: Path
    work_dir: Path
    roster: Roster
    turns: Turns
    bells: Bells
    in_line: Callable[[], Collection[str]]
    """Jobs that may start nothing now: they do not wait for their rollout, but for their turn."""
    proxy_url: str
    key: Callable[[str], str | None]
    """Of the role `control`, by the name under which a policy is served."""


@dataclass(frozen=True)
class Outcome:
    """How a desk ended. Without an error: the job is done."""

    error: BaseException | None = None

    @property
    def let_go(self) -> bool:
        """Nothing is to be told: somebody wanted it so, or has the job now."""
        return isinstance(self.error, LetGo)

    @property
    def passing(self) -> bool:
        """Another try may go well: infrastructure, or something that nobody foresaw."""
        error = self.error
        if error is None or isinstance(error, LetGo | OWN):
            return False
        return isinstance(error, INFRASTRUCTURE) or not isinstance(error, RollmillError)

    @property
    def reason(self) -> str:
        """One line, for the tenant."""
        return f"{type(self.error).__name__}: {' '.join(str(self.error).split())}"


class Desk:
    """Starts at once. `stretch` says how much longer than usual to wait between two looks for a batch, unless something
    is told to have arrived."""

    def __init__(self, id: str, config: RunConfig, shop: Shop, stretch: Callable[[], float]) -> None:
        self.id, self.config, self._shop, self._stretch = id, config, shop, stretch
        self.outcome: Outcome | None = None
        """Once it has ended."""
        self.steps = 0
        """Committed, or on their way, since it started."""
        self._stop = threading.Event()
        self._bell = shop.bells.hang(id)
        self._leader: Leader | None = None
        self._work_dir = shop.work_dir / config.prefix.replace("/", ".")
        self._cache = self._work_dir / "cache"
        self._thread = threading.Thread(target=self._run, name=f"desk {id}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let go of the job. Returns at once; from any thread."""
        self._stop.set()
        self._bell.set()
        if (leader := self._leader) is not None:
            leader.stop()
        self._shop.turns.withdraw(self.id)

    def join(self, deadline_s: float) -> bool:
        """Whether it has ended within this time."""
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    # -- its thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            with ExitStack() as stack:
                self._train(stack)
        except BaseException as raised:
            error = self._told(raised)
        key = self.config.prefix
        self._shop.bells.take_down(self.id, self._bell)
        self._shop.turns.errand(lambda: self._shop.roster.forget(key))
        shutil.rmtree(self._work_dir, ignore_errors=True)
        self.outcome = Outcome(error)

    def _told(self, error: BaseException) -> BaseException:
        """What the thread ended with, in the light of what is known."""
        if self._stop.is_set():
            return LetGo()
        if isinstance(error, Fenced) and self._has_another_trainer():
            log.info("job %s: %s", self.id, error)
            return LetGo()
        if not isinstance(error, RollmillError | LetGo):
            log.error("job %s: %s", self.id, error, exc_info=error)
        return error

    def _has_another_trainer(self) -> bool:
        """Whether a trainer took the job over, and not an operator for a moment, who rolled it back, say. If that can
        not be told, none is assumed: a further fence tells."""
        try:
            reader = LogReader(self._shop.store, self.config.prefix)
            fence = reader.read(reader.sync().fence)
        except RollmillError:
            return False
        return fence is not None and fence.writer.startswith(TRAINER) and fence.writer != writer()

    def _train(self, stack: ExitStack) -> None:
        config, shop = self.config, self._shop
        taken = Takeover(config, shop.store, self._cache)
        checkpoints = Checkpoints(config, shop.weights(), shop.base, self._work_dir)
        if taken.version is None:
            taken.initialise(checkpoints, self._turn(lambda: shop.roster.begin(config, self._next_ones())))
        if taken.steps == 0:
            return
        key = shop.key(config.served_as)
        leader = self._leader = taken.appoint(checkpoints, shop.proxy_url, key, stack, self._pause)
        self._check()
        for _ in range(taken.steps):
            self._step(taken, leader)
            self.steps += 1
        leader.finish()
        self._check()  # who was let go of in the last moment may not have committed

    def _step(self, taken: Takeover, leader: Leader) -> None:
        batch = leader.next_batch()
        fetch = cache(partial(taken.pull, leader.settle()))
        if not self._shop.roster.holds(self.config.prefix, batch.base):
            fetch()  # here, while others train
        advantages = advantage_function(self.config.training.advantage)
        window = Window(batch.version, rows_of(batch.groups, advantages, batch.base))
        leader.clock.start("queue")
        figures, snapshot = self._turn(lambda: self._update(leader, batch, window, fetch))
        shutil.rmtree(self._cache, ignore_errors=True)
        leader.commit(figures, lambda full: snapshot)

    def _update(
        self, leader: Leader, batch: Batch, window: Window, fetch: Callable[[], Path]
    ) -> tuple[dict[str, float], Snapshot]:
        """On the optimizer's thread."""
        roster, clock = self._shop.roster, leader.clock
        clock.stop("queue")
        with nullcontext() if roster.holds(self.config.prefix, batch.base) else clock.span("restore"):
            member = roster.bring(self.config, batch.base, fetch, self._next_ones())
        leader.begin()
        try:
            return roster.update(self.config, member, window)
        finally:
            leader.end()

    def _next_ones(self) -> list[str]:
        """Whose turn comes, as the roster knows them."""
        return [f"{id}/" for id in self._shop.turns.waiting]

    def _turn(self, work: Callable[[], T]) -> T:
        self._check()
        answer = self._shop.turns.ask(self.id, work)
        if self._stop.is_set():  # before it asked: nobody else would withdraw it
            self._shop.turns.withdraw(self.id)
        return answer.result()

    def _pause(self, seconds: float) -> bool:
        """Until something arrives for the job; under alpha 0 there is nothing else that a look could find. Whether
        nothing could, for others go before it."""
        self._bell.wait(max(seconds, UNASKED_S) if self.config.mode.alternates else seconds * self._stretch())
        self._bell.clear()
        self._check()
        return self.id in self._shop.in_line()

    def _check(self) -> None:
        if self._stop.is_set():
            raise LetGo
