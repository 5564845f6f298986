"""The HTTP face of the proxy: Starlette routes over `control.Proxy`, one family a file.

    native.py     POST /generate, /trajectories/{id}/abort
    steering.py   POST /control/suspend|prefetch|update|resume
    here          GET  /status /healthz /metrics
"""

from __future__ import annotations

import dataclasses

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from infra.proxy import native, steering
from infra.proxy.control import Proxy
from infra.proxy.http import answer


def make_app(proxy: Proxy) -> Starlette:
    """The ASGI application of one proxy."""

    async def status(request: Request) -> Response:
        return answer(dataclasses.asdict(await proxy.status()))

    async def healthz(request: Request) -> Response:
        healthy = await proxy.engine.health()
        return answer({"healthy": healthy}, 200 if healthy else 503)

    async def metrics(request: Request) -> Response:
        return Response(proxy.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return Starlette(
        routes=[
            *native.routes(proxy),
            *steering.routes(proxy),
            Route("/status", status),
            Route("/healthz", healthz),
            Route("/metrics", metrics),
        ]
    )
