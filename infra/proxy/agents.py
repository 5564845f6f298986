"""What the routes of OpenAI's API have in common: whose session, what is refused, and how an answer is told.

Invariant: a request is refused, or answered in full: what is streamed was sampled before, in one piece.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from infra.engines.connection import while_connected
from infra.engines.errors import BadRequest
from infra.proxy.auth import bearer
from infra.proxy.http import Failure, post, read
from infra.proxy.openai import Request, error_response
from infra.proxy.refusals import Denied
from infra.proxy.sessions import Ask, Heard, Session, Sessions

R = TypeVar("R", bound=Request)


def session_of(sessions: Sessions, request: HttpRequest) -> Session:
    """Whose token the request carries. Raises Denied (401)."""
    token = bearer(request.headers)
    session = sessions.of_token(token) if token is not None else None
    if session is None:
        raise Denied("unauthorized", 401, "send the token of an open session as `Authorization: Bearer <token>`")
    return session


def agent_post(
    sessions: Sessions, path: str, model: type[R], endpoint: Callable[[HttpRequest, Session, R], Awaitable[Response]]
) -> Route:
    """A POST route of OpenAI's API; refusals are counted for the session's tenant and domain."""

    async def named(request: HttpRequest) -> Response:
        session = session_of(sessions, request)
        try:
            return await endpoint(request, session, await _read(sessions, session, request, model))
        except Exception as error:
            body = session.body
            sessions.proxy.metrics.refusals.labels(Failure.of(error).name, body.tenant, body.domain).inc()
            raise

    return post(path, named, error_response)


async def _read(sessions: Sessions, session: Session, request: HttpRequest, model: type[R]) -> R:
    asked = await read(request, model)
    serves, temperature = sessions.proxy.config.name, session.body.temperature
    if asked.model != serves:
        raise Denied("model_not_found", 404, f"model: {asked.model!r} is not served here; {serves!r} is")
    if asked.temperature is not None and asked.temperature != temperature:
        raise BadRequest(
            f"temperature: {asked.temperature:g} is not that of this session ({temperature:g}), at which its policy is "
            f"trained; leave it away"
        )
    return asked


async def sampled(sessions: Sessions, request: HttpRequest, session: Session, ask: Ask) -> Heard:
    """The turn; it ends when the client goes away. Raises as `Sessions.sample`, and Gone."""
    return await while_connected(request.receive, sessions.sample(session, ask))


def usage(heard: Heard) -> dict[str, int]:
    sampled = len(heard.turn.token_ids)
    return {
        "prompt_tokens": heard.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": heard.prompt_tokens + sampled,
    }


def envelope(kind: str, prefix: str, session: Session, model: str, heard: Heard) -> dict[str, Any]:
    """What stands around the choices."""
    return {
        "id": f"{prefix}-{session.name}-{heard.turn.number}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def events(chunks: Iterable[dict[str, Any]]) -> Response:
    """Chunks as server-sent events."""
    lines = [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks]
    return Response(b"".join(lines) + b"data: [DONE]\n\n", media_type="text/event-stream")
