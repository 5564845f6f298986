"""Routes of the trainer, which steer what is served.

    POST /control/suspend|prefetch|update|resume    403 fenced, 404 unknown_fence | unknown_version,
                                                    422 weights that do not fit
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from infra.proxy.control import Proxy
from infra.proxy.http import answer, post, read
from infra.proxy.wire import FenceBody, PrefetchBody, UpdateBody


def routes(proxy: Proxy) -> list[Route]:
    """Of one proxy."""

    async def suspend(request: Request) -> Response:
        await proxy.suspend((await read(request, FenceBody)).fence)
        return answer({"suspended": True})

    async def resume(request: Request) -> Response:
        await proxy.resume((await read(request, FenceBody)).fence)
        return answer({"suspended": False})

    async def prefetch(request: Request) -> Response:
        body = await read(request, PrefetchBody)
        await proxy.prefetch(body.fence, body.version)
        return answer({"prefetched": body.version})

    async def update(request: Request) -> Response:
        body = await read(request, UpdateBody)
        await proxy.update(body.fence, body.version, body.oldest_viable)
        return answer({"serving": body.version})

    return [
        post("/control/suspend", suspend),
        post("/control/prefetch", prefetch),
        post("/control/update", update),
        post("/control/resume", resume),
    ]
