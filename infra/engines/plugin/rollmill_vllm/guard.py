"""A key for every route of a vLLM server.

Invariants: without the bearer key of the environment (VLLM_API_KEY) only `/health` answers; vLLM's own check leaves
the routes open that pause a server or replace its weights. A server without a key answers nothing else at all.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

OPEN = "/health"


class Guard:
    """ASGI middleware, for `--middleware rollmill_vllm.guard.Guard`."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self._app = app
        key = os.environ.get("VLLM_API_KEY", "")
        self._wanted = f"Bearer {key}".encode() if key else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and (scope["path"] == OPEN or self._knows(scope))):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "unauthorized"}'})

    def _knows(self, scope: Any) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return self._wanted is not None and len(given) == 1 and hmac.compare_digest(given[0], self._wanted)
