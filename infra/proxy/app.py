"""The HTTP face of the proxy: Starlette routes over `control.Proxy`, one family a file.

    native.py           POST /generate (in front of Starlette), /trajectories/{id}/abort
    steering.py         POST /control/suspend|prefetch|update|resume
    session_routes.py   POST /sessions, GET and DELETE /sessions/{id}
    chat.py             POST /v1/chat/completions
    completions.py      POST /v1/completions, GET /v1/models
    here                GET  /status /healthz /metrics
    auth.py             in front of all of them
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from infra.chat import ChatCodec
from infra.proxy import chat, completions, native, session_routes, steering
from infra.proxy.auth import Guard, Keys
from infra.proxy.control import Proxy
from infra.proxy.http import answer
from infra.proxy.sessions import Sessions


def make_app(proxy: Proxy, keys: Keys | None = None, codec: Callable[[], ChatCodec] | None = None) -> App:
    """The ASGI application of one proxy. Without keys it has to listen on loopback, for whoever reaches it may do
    anything. `codec` makes the policy's chat codec, when the first session is opened; without it there are none."""
    sessions = Sessions(proxy, codec) if codec is not None else None

    async def status(request: Request) -> Response:
        return answer(dataclasses.asdict(await proxy.status()))

    async def healthz(request: Request) -> Response:
        healthy = await proxy.engine.health()
        return answer({"healthy": healthy}, 200 if healthy else 503)

    async def metrics(request: Request) -> Response:
        return Response(proxy.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    routes = [
        *native.routes(proxy, sessions),
        *steering.routes(proxy),
        Route("/status", status),
        Route("/healthz", healthz),
        Route("/metrics", metrics),
    ]
    if sessions is not None:
        routes += [*session_routes.routes(sessions), *chat.routes(sessions), *completions.routes(sessions)]
    generate = native.Generate(proxy)
    if keys is None:
        return App(generate, sessions, routes=routes)

    def is_session(token: str) -> bool:
        return app.knows(token)

    guard = Middleware(Guard, keys, is_session)
    app = App(Guard(generate, keys, is_session), sessions, routes=routes, middleware=[guard])
    return app


class App(Starlette):
    """With a way of its own for `generate`, the one route that is called all the time."""

    def __init__(self, generate: ASGIApp, sessions: Sessions | None, **options: Any):
        super().__init__(**options)
        self._generate, self._sessions = generate, sessions

    def knows(self, token: str) -> bool:
        """Whether it is the token of a session that lives here."""
        return self._sessions is not None and self._sessions.of_token(token) is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hot = scope["type"] == "http" and scope["path"] == native.GENERATE and scope["method"] == "POST"
        await (self._generate if hot else super().__call__)(scope, receive, send)
