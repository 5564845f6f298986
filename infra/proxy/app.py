"""The HTTP face of the proxy: Starlette routes over `control.Proxy`.

    POST /generate                      409 stale | cancelled, 422 a field is wrong, 503 unavailable + Retry-After
    POST /trajectories/{id}/abort
    POST /control/suspend|prefetch|update|resume    403 fenced, 404 unknown_fence | unknown_version,
                                                    422 weights that do not fit
    GET  /status /healthz /metrics

Invariants: every answer but /metrics is JSON; every failure has an `error` name and a `detail`; a client that goes
away while it waits frees its place in the engine; a POST whose content type is not application/json gets 415, so
that a page in somebody's browser can not send one (a browser asks first, and gets no permission here).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from infra.engines.errors import BadRequest, EngineClosed, PromptTooLong, UnknownPolicy
from infra.proxy.control import Proxy, Refused, UnknownFence
from infra.proxy.versions import UnknownVersion
from infra.proxy.wire import FenceBody, GenerateBody, PrefetchBody, UpdateBody
from infra.store.errors import StoreUnavailable
from rl.errors import Fenced, RollmillError

B = TypeVar("B", bound=BaseModel)
RETRY_AFTER_S = "1"
GONE = 499
"""Status of an answer that nobody reads: the client closed the connection."""

logger = logging.getLogger(__name__)


class NotJson(RollmillError):
    """A request whose content type is not that of JSON."""


def make_app(proxy: Proxy) -> Starlette:
    """The ASGI application of one proxy."""

    async def generate(request: Request) -> Response:
        body = await _body(request, GenerateBody)
        work = asyncio.ensure_future(proxy.generate(body))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                proxy.metrics.refusals.labels("disconnected").inc()
                return _json({"error": "disconnected", "detail": "the client went away"}, GONE)
            result = work.result()
        finally:
            work.cancel()
            gone.cancel()
        return _json(
            {
                "token_ids": result.token_ids,
                "logprobs": result.logprobs,
                "finish_reason": result.finish_reason,
                "version_spans": result.version_spans,
            }
        )

    async def abort(request: Request) -> Response:
        return _json({"aborted": proxy.abort(request.path_params["trajectory"])})

    async def suspend(request: Request) -> Response:
        await proxy.suspend((await _body(request, FenceBody)).fence)
        return _json({"suspended": True})

    async def resume(request: Request) -> Response:
        await proxy.resume((await _body(request, FenceBody)).fence)
        return _json({"suspended": False})

    async def prefetch(request: Request) -> Response:
        body = await _body(request, PrefetchBody)
        await proxy.prefetch(body.fence, body.version)
        return _json({"prefetched": body.version})

    async def update(request: Request) -> Response:
        body = await _body(request, UpdateBody)
        await proxy.update(body.fence, body.version, body.oldest_viable)
        return _json({"serving": body.version})

    async def status(request: Request) -> Response:
        return _json(dataclasses.asdict(await proxy.status()))

    async def healthz(request: Request) -> Response:
        healthy = await proxy.engine.health()
        return _json({"healthy": healthy}, 200 if healthy else 503)

    async def metrics(request: Request) -> Response:
        return Response(proxy.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def post(path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
        async def named(request: Request) -> Response:
            try:
                _check_type(request)
                return await endpoint(request)
            except Exception as error:
                name, code = _name(error)
                if endpoint is generate:
                    proxy.metrics.refusals.labels(name).inc()
                return _failure(name, code, error)

        return Route(path, named, methods=["POST"])

    return Starlette(
        routes=[
            post("/generate", generate),
            post("/trajectories/{trajectory:path}/abort", abort),
            post("/control/suspend", suspend),
            post("/control/prefetch", prefetch),
            post("/control/update", update),
            post("/control/resume", resume),
            Route("/status", status),
            Route("/healthz", healthz),
            Route("/metrics", metrics),
        ]
    )


def _name(error: Exception) -> tuple[str, int]:
    """Name and status of a failure."""
    match error:
        case Refused(reason="unavailable") | EngineClosed() | StoreUnavailable():
            return "unavailable", 503
        case Refused():
            return error.reason, 409
        case Fenced():
            return "fenced", 403
        case NotJson():
            return "unsupported_media_type", 415
        case UnknownFence():
            return "unknown_fence", 404
        case UnknownVersion():
            return "unknown_version", 404
        case UnknownPolicy():
            return "unknown_policy", 422
        case PromptTooLong():
            return "prompt_too_long", 422
        case BadRequest() | ValidationError():
            return "bad_request", 422
        case ClientDisconnect():
            return "disconnected", GONE
        case RollmillError():
            return type(error).__name__, 500
    return "internal", 500


def _failure(name: str, code: int, error: Exception) -> Response:
    content: dict[str, Any] = {"error": name, "detail": str(error)}
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        content |= {"field": field, "detail": f"{field}: {first['msg']}"}
    if name == "internal":
        logger.error("a request failed", exc_info=error)
        content["detail"] = f"{type(error).__name__}: {error}"
    return _json(content, code, {"Retry-After": RETRY_AFTER_S} if code == 503 else None)


def _check_type(request: Request) -> None:
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise NotJson(f"the content type is {given!r}; send JSON, as application/json")


async def _body(request: Request, model: type[B]) -> B:
    try:
        content = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    return model.model_validate(content)


async def _disconnected(request: Request) -> None:
    """Return when the client has gone away; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")
