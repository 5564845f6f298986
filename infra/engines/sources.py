"""Where an engine finds the versions that it is told to serve.

Invariants: a version's files are used where the proxy has them, if they are on this machine, else they are pulled from
the store; tenants come and go, so only those that were used lately are remembered, and none is forgotten in its use.
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path

from infra.proxy.versions import VersionSource
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.config.run import RunConfig

KEPT = 256
"""Tenants whose logs are followed; each takes a thread."""


class Sources:
    """Of one engine. `pull` as in `VersionSource`, `own` is a directory for this object alone. One event loop's."""

    def __init__(
        self, config: RunConfig, store: ObjectStore, pull: Callable[[str, str, Path], Path], own: Path, kept: int = KEPT
    ) -> None:
        self._config, self._store, self._pull, self._own, self._kept = config, store, pull, own, kept
        self._sources: OrderedDict[str, tuple[VersionSource, Path]] = OrderedDict()
        self._used: Counter[str] = Counter()

    async def directory(self, tenant: str, version: int, told: str) -> Path:
        """The local directory of a version, which the proxy has at `told`. Raises UnknownVersion or StoreError."""
        if Path(told).is_dir():
            return Path(told)
        self._used[tenant] += 1
        try:
            source = self._source(tenant)
            return await source.directory(await source.look(), version)
        finally:
            self._used[tenant] -= 1
            await self._forget()

    def _source(self, tenant: str) -> VersionSource:
        if tenant not in self._sources:
            prefix = prefix_of(self._config, tenant)
            log = CommitLog(self._store, prefix, f"engine-{uuid.uuid4().hex[:8]}")
            place = self._own / f"{tenant or 'whole'}-{uuid.uuid4().hex[:8]}"
            self._sources[tenant] = VersionSource(log, prefix, self._config.policy, place, self._pull), place
        self._sources.move_to_end(tenant)
        return self._sources[tenant][0]

    async def _forget(self) -> None:
        while len(self._sources) > self._kept:
            tenant = next((tenant for tenant in self._sources if not self._used[tenant]), None)
            if tenant is None:
                return
            source, place = self._sources.pop(tenant)
            del self._used[tenant]
            source.close()
            await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)

    def close(self) -> None:
        for source, _ in self._sources.values():
            source.close()


def prefix_of(config: RunConfig, tenant: str) -> str:
    """Where the versions of a policy lie: of this run's own, or of a job of the service whose host it is."""
    return config.prefix if tenant == config.served_as else f"{tenant.replace('.', '/', 1)}/"
