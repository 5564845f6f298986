"""An engine that computes nothing and fails as it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from infra.engines.errors import UnknownPolicy
from infra.engines.protocol import Generation, Sampling
from infra.proxy.fleet import Fleet


class StubEngine:
    """`fails` by call, or by call and tenant, the first first: what it raises; a pause that fails has paused it all the
    same. `takes` is called when a call begins. `calls` is what began, in order."""

    capabilities = Fleet.capabilities

    def __init__(self) -> None:
        self.fails: dict[str, list[Exception]] = {}
        self.takes: Callable[[], None] = lambda: None
        self.calls: list[str] = []
        self.paused = self.closed = False
        self.serves: dict[str, int] = {}
        self.read: set[str] = set()

    async def _begin(self, call: str) -> None:
        self.calls.append(call)
        self.takes()
        await asyncio.sleep(0)

    def _end(self, call: str) -> None:
        if self.fails.get(call):
            raise self.fails[call].pop(0)

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, tenant: str, request_id: str, **more: Any
    ) -> Generation:
        await self._begin("generate")
        if tenant not in self.serves:
            raise UnknownPolicy(tenant)
        self._end("generate")
        return Generation([1], [-1.0], "length", [(0, self.serves[tenant])])

    async def prefetch(self, tenant: str, version: int, directory: Path) -> None:
        await self._begin("prefetch")
        self._end("prefetch")
        self._end(f"prefetch {tenant}")
        self.read.add(tenant)

    async def publish_adapter(self, tenant: str, version: int, directory: Path) -> None:
        await self._begin("publish")
        self._end("publish")
        self._end(f"publish {tenant}")
        self.serves[tenant] = version

    async def update_weights(self, version: int, directory: Path) -> None:
        await self.publish_adapter("", version, directory)

    async def withdraw_adapter(self, tenant: str) -> None:
        await self._begin("withdraw")
        self.serves.pop(tenant, None)
        self.read.discard(tenant)

    async def held(self) -> Collection[str]:
        return (self.serves.keys() | self.read) - {""}

    async def pause(self, mode: str = "keep") -> None:
        await self._begin("pause")
        self.paused = True
        self._end("pause")

    async def resume(self) -> None:
        await self._begin("resume")
        self._end("resume")
        self.paused = False

    async def abort(self, request_ids: Collection[str]) -> None:
        await self._begin("abort")

    def versions(self) -> dict[str, int]:
        return dict(self.serves)

    async def health(self) -> bool:
        return not self.closed

    async def stats(self) -> dict[str, Any]:
        return {"paused": self.paused}

    async def close(self) -> None:
        self.closed = True
