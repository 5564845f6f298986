"""Routes of the project's own trajectories: tokens in, tokens out.

    POST /generate                      409 stale | cancelled, 422 a field is wrong, 429 too_many_requests and
                                        503 unavailable, both with Retry-After
    POST /trajectories/{id}/abort

Invariant: a client that goes away while it waits frees its place in the engine.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from infra.engines.connection import while_connected
from infra.engines.errors import BadRequest
from infra.proxy.control import Proxy
from infra.proxy.http import Failure, answer, check_type, post
from infra.proxy.sessions import Sessions
from infra.proxy.wire import GenerateBody

GENERATE = "/generate"
START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"application/json")],
}


def routes(proxy: Proxy, sessions: Sessions | None) -> list[Route]:
    """Of one proxy, but for `Generate`."""

    async def abort(request: Request) -> Response:
        trajectory = request.path_params["trajectory"]
        if sessions is not None:
            sessions.cancel(trajectory)
        return answer({"aborted": proxy.abort(trajectory)})

    return [post("/trajectories/{trajectory:path}/abort", abort)]


class Generate:
    """POST /generate, as a bare ASGI application: Starlette's layers would cost as much again as the rest of it, in
    the process whose interpreter the embedded engine needs for its next token."""

    def __init__(self, proxy: Proxy):
        self._proxy = proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            check_type(Request(scope))
            raw = await _body(receive)
            result = await self._generate(raw, receive)
        except Exception as error:
            await Failure.of(error).response()(scope, receive, send)
            return
        body = orjson.dumps(
            {
                "token_ids": result.token_ids,
                "logprobs": result.logprobs,
                "finish_reason": result.finish_reason,
                "version_spans": result.version_spans,
            }
        )
        length = (b"content-length", str(len(body)).encode())
        await send({**START, "headers": [*START["headers"], length]})
        await send({"type": "http.response.body", "body": body})

    async def _generate(self, raw: bytes, receive: Receive) -> Any:
        try:
            content = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"the body is not JSON: {error}") from error
        body = GenerateBody.model_validate(content)
        try:
            return await while_connected(receive, self._proxy.generate(body))
        except Exception as error:
            self._proxy.metrics.refusals.labels(Failure.of(error).name, body.tenant, body.domain).inc()
            raise


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)
