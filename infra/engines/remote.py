"""An engine in another process, by way of its host (`host`), for the proxy.

Invariants
- A generation that is cut off raises EngineClosed with what was told of it until then (`partial`).
- `close` ends every call at once, also to a host that hangs; the host itself is left as it is.
- Every call has a deadline: `load_s` where the engine reads a policy, else `control_s`; generations have their
  caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp
import orjson

from infra.engines import deadlines
from infra.engines.deadlines import Deadline
from infra.engines.errors import EngineClosed
from infra.engines.host_wire import Call, named, take
from infra.engines.protocol import Capabilities, Generation, Prefilled, Sampling
from rl.errors import DeadlineExceeded

CONNECT_S = 10.0
LOAD_S = 600.0
LINE_BYTES = 1 << 24


class RemoteEngine:
    """Made on the event loop that uses it. `capabilities` are what the host says of its engine."""

    def __init__(self, url: str, key: str, capabilities: Capabilities, control_s: float, load_s: float = LOAD_S):
        self.url, self.capabilities = url.rstrip("/"), capabilities
        self._control, self._load = deadlines.control(control_s), deadlines.load(load_s)
        self._versions: dict[str, int] = {}
        self._calls: set[asyncio.Timeout] = set()
        self._closed = False
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            trust_env=False,
            read_bufsize=LINE_BYTES,
        )

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        tenant: str,
        request_id: str,
        kv: Prefilled | None = None,
    ) -> Generation:
        """See the protocol. Raises EngineClosed with `partial`."""
        so_far = Generation([], [], "abort")
        body = Call(token_ids, sampling, tenant, request_id, kv).dump()
        try:
            async with self._call(None):
                async with self._http.post(f"{self.url}/generate", data=body) as reply:
                    if reply.status != 200:
                        raise self._refusal(reply.status, await reply.read())
                    async for raw in reply.content:
                        if take(raw, so_far):
                            return so_far
                raise EngineClosed(f"the engine at {self.url} ended in the middle of {request_id}")
        except EngineClosed as error:
            error.partial = so_far
            raise

    async def prefill(self, token_ids: Sequence[int], sampling: Sampling, tenant: str, request_id: str) -> Prefilled:
        """Compute a prompt; where its keys and values are, for `generate` of another engine."""
        body = Call(token_ids, sampling, tenant, request_id).dump()
        return Prefilled(*(await self._post("/prefill", body))["kv"])

    async def prefetch(self, tenant: str, version: int, directory: Path) -> None:
        await self._version("/prefetch", tenant, version, directory, self._load)

    async def publish_adapter(self, tenant: str, version: int, directory: Path) -> None:
        await self._version("/publish", tenant, version, directory)
        self._versions[tenant] = version

    async def withdraw_adapter(self, tenant: str) -> None:
        await self._post("/withdraw", orjson.dumps({"tenant": tenant}))
        self._versions.pop(tenant, None)

    async def held(self) -> Collection[str]:
        """See the protocol: what the engine says, also of what another proxy had it read."""
        return (await self._post("/held", b"{}"))["tenants"]

    async def update_weights(self, version: int, directory: Path) -> None:
        await self._version("/update", "", version, directory)
        self._versions[""] = version

    async def _version(
        self, path: str, tenant: str, version: int, directory: Path, within: Deadline | None = None
    ) -> None:
        body = {"tenant": tenant, "version": version, "directory": str(directory)}
        await self._post(path, orjson.dumps(body), within)

    async def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        await self._post("/pause", orjson.dumps({"mode": mode}))

    async def resume(self) -> None:
        await self._post("/resume", b"{}")

    async def abort(self, request_ids: Collection[str]) -> None:
        await self._post("/abort", orjson.dumps({"request_ids": sorted(request_ids)}))

    def versions(self) -> dict[str, int]:
        return dict(self._versions)

    async def health(self) -> bool:
        try:
            return bool((await self._post("/health", b"{}"))["healthy"])
        except (EngineClosed, DeadlineExceeded):
            return False

    async def stats(self) -> dict[str, Any]:
        return await self._post("/stats", b"{}")

    async def close(self) -> None:
        """End every call with EngineClosed. Idempotent."""
        self._closed = True
        for scope in list(self._calls):
            scope.reschedule(asyncio.get_running_loop().time())
        await self._http.close()

    # -- calls -------------------------------------------------------------------------------------------------

    async def _post(self, path: str, body: bytes, within: Deadline | None = None) -> dict[str, Any]:
        async with self._call(within or self._control), self._http.post(self.url + path, data=body) as reply:
            raw = await reply.read()
            if reply.status != 200:
                raise self._refusal(reply.status, raw)
            return orjson.loads(raw)

    def _call(self, within: Deadline | None) -> _Call:
        return _Call(self, within)

    def _refusal(self, status: int, raw: bytes) -> Exception:
        try:
            return named(orjson.loads(raw))
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return EngineClosed(f"the engine at {self.url} answers {status}: {raw[:200].decode(errors='replace')}")


class _Call:
    """One call: bounded, ended by `close`, and with a name for whatever cuts it."""

    def __init__(self, engine: RemoteEngine, within: Deadline | None):
        self._engine, self._within = engine, within
        self._scope = asyncio.timeout(None if within is None else within.seconds)

    async def __aenter__(self) -> None:
        if self._engine._closed:
            raise EngineClosed(f"the engine at {self._engine.url} is no longer in use")
        await self._scope.__aenter__()
        self._engine._calls.add(self._scope)

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._engine._calls.discard(self._scope)
        url = self._engine.url
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:
            if self._engine._closed:
                raise EngineClosed(f"the engine at {url} is no longer in use") from error
            raise DeadlineExceeded(f"the engine at {url} did not answer within {self._within}") from error
        if self._engine._closed and isinstance(error, RuntimeError):  # aiohttp's, of what was closed under a call
            raise EngineClosed(f"the engine at {url} is no longer in use") from error
        if isinstance(error, aiohttp.ClientError | ConnectionError | orjson.JSONDecodeError):
            raise EngineClosed(f"the engine at {url} is gone: {type(error).__name__}: {error}") from error
