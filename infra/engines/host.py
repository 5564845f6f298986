"""The HTTP face of one engine, for `remote.RemoteEngine`: every call of the protocol, by POST, under one key.

    /generate /prefill /pause /resume /abort /prefetch /publish /withdraw /held /update /health /stats

Invariants
- Nothing is answered without the key (compared in constant time), which is in the header alone.
- A generation tells what it has every `TELL_S`, so that another engine can go on from there if this one is killed.
- A client that goes away frees its place in the engine, and that of a prompt which is computed for it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from infra.engines.connection import disconnected, while_connected
from infra.engines.errors import BadRequest, EngineClosed
from infra.engines.host_wire import Call, error_line, failure, line
from infra.engines.protocol import BASE, Engine, Generation

TELL_S = 0.1
Fetch = Callable[[str, int, str], Awaitable[Path]]
"""The local directory of a tenant's version, given where the caller has it."""


def make_host(engine: Engine, key: str, fetch: Fetch) -> Starlette:
    """The ASGI application of an engine. `fetch` brings a version's files to this machine."""

    async def generate(body: bytes) -> Response:
        return _Told(engine, Call.load(body))

    async def prefill(body: bytes) -> Any:
        compute = getattr(engine, "prefill", None)
        if compute is None:
            raise BadRequest("this engine does not split prompts from answers")
        call = Call.load(body)
        kept = await compute(call.token_ids, call.sampling, call.tenant, call.request_id)
        return {"kv": [kept.version, kept.params]}

    async def pause(body: bytes) -> Any:
        await engine.pause(orjson.loads(body)["mode"])

    async def resume(body: bytes) -> Any:
        await engine.resume()

    async def abort(body: bytes) -> Any:
        await engine.abort(orjson.loads(body)["request_ids"])

    async def prefetch(body: bytes) -> Any:
        await engine.prefetch(*await version(body))

    async def publish(body: bytes) -> Any:
        await engine.publish_adapter(*await version(body))

    async def withdraw(body: bytes) -> Any:
        await engine.withdraw_adapter(orjson.loads(body)["tenant"])

    async def held(body: bytes) -> Any:
        return {"tenants": sorted(await engine.held())}

    async def update(body: bytes) -> Any:
        tenant, number, directory = await version(body)
        if tenant != BASE:
            raise BadRequest(f"tenant {tenant!r} has an adapter; the base's weights are of no tenant")
        await engine.update_weights(number, directory)

    async def version(body: bytes) -> tuple[str, int, Path]:
        tree = orjson.loads(body)
        return tree["tenant"], tree["version"], await fetch(tree["tenant"], tree["version"], tree["directory"])

    async def health(body: bytes) -> Any:
        return {"healthy": await engine.health()}

    async def stats(body: bytes) -> Any:
        return await engine.stats()

    calls = (generate, pause, resume, abort, prefetch, publish, withdraw, held, update, health, stats)
    return Starlette(routes=[_route(prefill, key, leave=True), *(_route(call, key) for call in calls)])


def _route(call: Callable[[bytes], Awaitable[Any]], key: str, leave: bool = False) -> Route:
    """`leave`: a call that ends when its client goes away."""
    expected = f"Bearer {key}"

    async def answer(request: Request) -> Response:
        if not secrets.compare_digest(request.headers.get("authorization", "").encode(), expected.encode()):
            return Response(orjson.dumps({"error": "BadRequest", "detail": "the key is missing or wrong"}), 401)
        try:
            body = await request.body()
            found = await (while_connected(request.receive, call(body)) if leave else call(body))
        except Exception as error:
            return Response(orjson.dumps(failure(error)), 503 if isinstance(error, EngineClosed) else 422)
        return found if isinstance(found, Response) else Response(orjson.dumps({} if found is None else found))

    return Route(f"/{call.__name__}", answer, methods=["POST"])


class _Told(Response):
    """A generation as it goes on."""

    def __init__(self, engine: Engine, call: Call):
        super().__init__(media_type="application/x-ndjson")
        self.raw_headers = [h for h in self.raw_headers if h[0] != b"content-length"]
        self._engine, self._call = engine, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._call
        work = asyncio.ensure_future(
            self._engine.generate(call.token_ids, call.sampling, call.tenant, call.request_id, **self._more())
        )
        gone = asyncio.ensure_future(disconnected(receive))
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        told = 0
        try:
            while True:
                await asyncio.wait({work, gone}, timeout=TELL_S, return_when=asyncio.FIRST_COMPLETED)
                if work.done() or gone.done():
                    break
                so_far = self._so_far()
                if so_far is not None and len(so_far.token_ids) > told:
                    await _send(send, line(so_far, told, end=False))
                    told = len(so_far.token_ids)
            # one message with the end of the answer, so that whoever has read the line may use the connection again
            last = self._last(work, told) if work.done() else b""
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            work.cancel()
            gone.cancel()
            with suppress(BaseException):
                await work

    def _more(self) -> dict[str, Any]:
        return {} if self._call.kv is None else {"kv": self._call.kv}

    def _so_far(self) -> Generation | None:
        report = getattr(self._engine, "so_far", None)
        return None if report is None else report(self._call.request_id)

    def _last(self, work: asyncio.Future[Generation], told: int) -> bytes:
        error = work.exception()
        if error is None:
            return line(work.result(), told, end=True)
        if not isinstance(error, Exception):
            raise error
        partial = error.partial if isinstance(error, EngineClosed) else None
        before = b"" if partial is None else line(partial, told, end=False)
        return before + error_line(error)


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
