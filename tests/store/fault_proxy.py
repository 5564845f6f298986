"""A bad network in front of a good S3 server: a share of all requests, drawn by seed, meets a fault.

Invariant: what is not at fault passes unchanged, so that signatures hold: the client's Host, path and body.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

HOST = "127.0.0.1"
_OF_ONE_HOP = {"connection", "keep-alive", "transfer-encoding", "expect"}


class Fault(StrEnum):
    """What befalls a request; the server has done it in the cases named `after`."""

    ERROR_500 = "500"
    ERROR_503 = "503"
    ERROR_AFTER = "500 after"
    LOST = "connection closed"
    LOST_AFTER = "connection closed after"
    SILENT = "no answer"
    SILENT_AFTER = "no answer after"
    SLOW = "answer in drops"
    CUT = "answer cut short"


AFTER = (Fault.ERROR_AFTER, Fault.LOST_AFTER, Fault.SILENT_AFTER, Fault.SLOW, Fault.CUT)
DROPS, DROP_S = 5, 0.1


class FaultProxy:
    """Listens on a free loopback port, from `start` to `stop`, in a thread of its own."""

    def __init__(self, upstream: str, share: float, seed: int, silence_s: float):
        self.faults: Counter[Fault] = Counter()
        self.requests = 0
        self._upstream, self._share, self._silence_s = upstream, share, silence_s
        self._chance = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault proxy")
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(timeout=30)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()

    async def _open(self) -> None:
        self._session = aiohttp.ClientSession(
            auto_decompress=False, timeout=aiohttp.ClientTimeout(total=60), connector=aiohttp.TCPConnector(limit=0)
        )
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        fault = self._chance.choice(list(Fault)) if self._chance.random() < self._share else None
        if fault is not None:
            self.faults[fault] += 1
        body = await request.read()
        answer = web.Response(status=500)
        if fault is None or fault in AFTER:
            answer = await self._forward(request, body)
        match fault:
            case Fault.ERROR_500 | Fault.ERROR_AFTER:
                return web.Response(status=500)
            case Fault.ERROR_503:
                return web.Response(status=503)
            case Fault.LOST | Fault.LOST_AFTER:
                return await self._hang_up(request)
            case Fault.SILENT | Fault.SILENT_AFTER:
                await asyncio.sleep(self._silence_s)
                return await self._hang_up(request)
            case Fault.SLOW | Fault.CUT:
                return await self._in_drops(request, answer, whole=fault is Fault.SLOW)
        return answer

    async def _forward(self, request: web.Request, body: bytes) -> web.Response:
        headers = CIMultiDict((k, v) for k, v in request.headers.items() if k.lower() not in _OF_ONE_HOP)
        where = URL(self._upstream + request.raw_path, encoded=True)
        try:
            async with self._session.request(
                request.method, where, headers=headers, data=body, allow_redirects=False
            ) as answer:
                kept = CIMultiDict((k, v) for k, v in answer.headers.items() if k.lower() not in _OF_ONE_HOP)
                return web.Response(status=answer.status, headers=kept, body=await answer.read())
        except aiohttp.ClientError:
            return web.Response(status=502)

    async def _in_drops(self, request: web.Request, answer: web.Response, whole: bool) -> web.StreamResponse:
        """The answer bit by bit; unless `whole`, half of it and then the end of the connection."""
        body = answer.body if isinstance(answer.body, bytes) else b""
        if request.method == "HEAD" or not body:
            await asyncio.sleep(DROPS * DROP_S)
            return answer if whole else await self._hang_up(request)
        drops = web.StreamResponse(status=answer.status, headers=answer.headers)
        await drops.prepare(request)
        size = len(body) // DROPS + 1
        for at in range(0, len(body) if whole else len(body) // 2, size):
            await drops.write(body[at : at + size])
            await asyncio.sleep(DROP_S)
        return drops if whole else await self._hang_up(request)

    async def _hang_up(self, request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=500)  # to nobody


@contextlib.contextmanager
def bad_network(upstream: str, share: float, seed: int, silence_s: float) -> Iterator[FaultProxy]:
    proxy = FaultProxy(upstream, share, seed, silence_s)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
