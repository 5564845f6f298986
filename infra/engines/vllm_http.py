"""Calls to one vLLM server, with a deadline for every wait and a named error for every failure.

Invariants: the key goes into the header alone, never into an address or a message; proxies of the environment are not
asked, for a server is on loopback or a private network.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

from infra.engines import deadlines
from infra.engines.errors import BadRequest, EngineClosed, UnknownPolicy
from infra.engines.vllm_wire import told
from rl.errors import DeadlineExceeded, GenerationFailure

CONNECT_S = 10.0
LINE_BYTES = 1 << 24


class ServerCalls:
    """`url` without a path. `control_s` bounds every call but a stream, which its caller bounds."""

    def __init__(self, url: str, key: str, control_s: float):
        self.url, self._control_s = url.rstrip("/"), control_s
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """On the event loop of the calls."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            trust_env=False,
            read_bufsize=LINE_BYTES,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(self, method: str, path: str, body: bytes | None = None, within_s: float | None = None) -> bytes:
        """The answer's body. Raises EngineClosed, DeadlineExceeded, BadRequest, UnknownPolicy, GenerationFailure."""
        within = deadlines.control(self._control_s) if within_s is None else f"{within_s:g} s"
        try:
            async with (
                asyncio.timeout(within_s or self._control_s),
                self._opened().request(method, self.url + path, data=body) as answer,
            ):
                content = await answer.read()
        except TimeoutError as error:
            raise DeadlineExceeded(f"vLLM at {self.url} did not answer {path} within {within}") from error
        except aiohttp.ClientError as error:
            raise self._gone(error) from error
        except RuntimeError as error:  # aiohttp's, of what was closed under a call
            self._opened()
            raise self._gone(error) from error
        if answer.status != 200:
            raise self._refusal(answer.status, path, content)
        return content

    async def tell(self, path: str, body: Any = None, within_s: float | None = None) -> None:
        """Post a value as JSON; what is answered does not matter. Raises as `call`."""
        await self.call("POST", path, None if body is None else orjson.dumps(body), within_s)

    async def stream(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """The lines of the answer. Leaving the iteration closes the connection, which ends the request at the server.
        Raises as `call`, but for the deadline."""
        try:
            async with self._opened().post(self.url + path, data=body) as answer:
                if answer.status != 200:
                    raise self._refusal(answer.status, path, await answer.read())
                async for line in answer.content:
                    yield line
        except aiohttp.ClientError as error:
            raise self._gone(error) from error
        except RuntimeError as error:  # aiohttp's, of what was closed under a call
            self._opened()
            raise self._gone(error) from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineClosed("the engine was closed")
        return self._session

    def _gone(self, error: Exception) -> EngineClosed:
        return EngineClosed(f"vLLM at {self.url} is gone: {type(error).__name__}: {error}")

    def _refusal(self, status: int, path: str, content: bytes) -> Exception:
        try:
            text = told(orjson.loads(content))
        except orjson.JSONDecodeError:
            text = content[:500].decode(errors="replace")
        text = f"vLLM answered {path} with {status}: {text}"
        if status == 404:
            return UnknownPolicy(text)
        return BadRequest(text) if 400 <= status < 500 else GenerationFailure(text)
