"""Routes of the project's own trajectories: tokens in, tokens out.

    POST /generate                      409 stale | cancelled, 422 a field is wrong, 429 too_many_requests and
                                        503 unavailable, both with Retry-After
    POST /trajectories/{id}/abort

Invariant: a client that goes away while it waits frees its place in the engine.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from infra.proxy.control import Proxy
from infra.proxy.http import Failure, answer, post, read, while_connected
from infra.proxy.sessions import Sessions
from infra.proxy.wire import GenerateBody


def routes(proxy: Proxy, sessions: Sessions | None) -> list[Route]:
    """Of one proxy."""

    async def generate(request: Request) -> Response:
        body = await read(request, GenerateBody)
        try:
            result = await while_connected(request, proxy.generate(body))
        except Exception as error:
            proxy.metrics.refusals.labels(Failure.of(error).name, body.tenant, body.domain).inc()
            raise
        return answer(
            {
                "token_ids": result.token_ids,
                "logprobs": result.logprobs,
                "finish_reason": result.finish_reason,
                "version_spans": result.version_spans,
            }
        )

    async def abort(request: Request) -> Response:
        trajectory = request.path_params["trajectory"]
        if sessions is not None:
            sessions.cancel(trajectory)
        return answer({"aborted": proxy.abort(trajectory)})

    return [post("/generate", generate), post("/trajectories/{trajectory:path}/abort", abort)]
