"""The proxy's view of the commit log, and the files of the versions that it names.

Invariants: only a version that the log names is ever loaded, verified by its manifest; an object that is missing is
corruption only if the log, read again, still keeps the version; one that the log lets go, or that is older than what
the ledger knows, is loaded while it is there; the log is read by one thread only; at most the newest two pulled
versions stay on disk.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from infra.store.errors import Corrupt, NotFound
from infra.store.log import CommitLog
from rl.errors import RollmillError
from rl.records import StateRef
from rl.retention import loadable
from rl.staleness import StalenessPolicy

KEPT = 2


class UnknownVersion(RollmillError):
    """A version that the commit log does not name (any more)."""


@dataclass(frozen=True, slots=True)
class LogView:
    """What the proxy needs of the ledger at one moment."""

    head: int | None
    fence: int
    floor: int
    """The oldest start version that can still be trained."""
    states: dict[int, StateRef]


class VersionSource:
    """Follows one run. `prefix` is the run's; `cache` belongs to this object alone."""

    def __init__(
        self,
        log: CommitLog,
        prefix: str,
        policy: StalenessPolicy,
        cache: Path,
        pull: Callable[[str, str, Path], Path],
    ):
        """`pull` brings a version's `model/` into the cache, by key prefix and manifest (`WeightStore.pull`)."""
        self._log, self._prefix, self._policy, self._cache, self._pull = log, prefix, policy, cache, pull
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="commit-log")
        self._pulled: OrderedDict[int, Path] = OrderedDict()

    async def look(self) -> LogView:
        """Read what is new in the log. Raises StoreError or LogCorrupt."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, self._look)

    def _look(self) -> LogView:
        ledger = self._log.sync()
        return LogView(ledger.head, ledger.fence, self._policy.floor(ledger), loadable(ledger))

    def _older(self, version: int) -> StateRef | None:
        """The state of a version that may be there still, though it need not: every n-th stays below the gc floor."""
        step = None if version in self._log.ledger.deleted else self._log.step(version)
        return None if step is None else step.state

    async def directory(self, view: LogView, version: int) -> Path:
        """The local `model/` directory of a version. Raises UnknownVersion or StoreError."""
        state = view.states.get(version)
        if state is None and view.head is not None and version < view.head:
            state = await asyncio.get_running_loop().run_in_executor(self._reader, self._older, version)
        if state is None:
            raise UnknownVersion(f"version {version} is not in the commit log, or deleted (the head is {view.head})")
        if version not in self._pulled:
            try:
                self._pulled[version] = await asyncio.to_thread(
                    self._pull, self._prefix + state.prefix, state.manifest_sha256, self._cache
                )
            except (NotFound, Corrupt) as error:
                if version not in (await self.look()).states:
                    raise UnknownVersion(f"version {version} was deleted meanwhile") from error
                raise
        self._pulled.move_to_end(version)
        while len(self._pulled) > KEPT:
            _, old = self._pulled.popitem(last=False)
            if old not in self._pulled.values():  # equal contents share a path
                await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)
        return self._pulled[version] / "model"

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)
