"""Routes that open, look at and close sessions of agents.

    POST   /sessions          -> {session, base_url, token, model}
    GET    /sessions/{id}     -> what was recorded so far; 404 unknown_session
    DELETE /sessions/{id}     -> the same, and the session is gone
"""

from __future__ import annotations

import dataclasses

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from infra.proxy.http import answer, post, read, route
from infra.proxy.refusals import Denied
from infra.proxy.session_wire import RECORD, Opened, SessionBody
from infra.proxy.sessions import Session, Sessions


def routes(sessions: Sessions) -> list[Route]:
    """Of one proxy."""

    async def start(request: Request) -> Response:
        token, session = await sessions.open(await read(request, SessionBody))
        opened = Opened(session.name, f"{request.base_url}v1", token, sessions.proxy.config.name)
        return answer(dataclasses.asdict(opened))

    async def look(request: Request) -> Response:
        return Response(RECORD.dump_json(_found(request).record()), media_type="application/json")

    async def close(request: Request) -> Response:
        return Response(RECORD.dump_json(sessions.close(_found(request))), media_type="application/json")

    def _found(request: Request) -> Session:
        name = request.path_params["session"]
        if (session := sessions.of_name(name)) is None:
            raise Denied("unknown_session", 404, f"session {name} was never opened here, was closed, or is too old")
        return session

    return [
        post("/sessions", start),
        route("/sessions/{session}", "GET", look),
        route("/sessions/{session}", "DELETE", close),
    ]
