"""Environments of OpenEnv, unchanged, on their own server: one session over a WebSocket per episode.

    environment: openenv
    environment_options: {url: "http://127.0.0.1:8000", action: message, observation: echoed_message}

Invariants
- The server's own errors are failures of the environment; that an action does not fit its schema is a mistake of
  the policy, unless that action was made here of plain text.
- A session ends with `close`, also when the server hangs.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

import aiohttp

from envs.adapters.translation import seed_of
from envs.protocol import Environment, Hints, Mistake, Needs, Step
from rl.trajectory import Message, Problem

CONNECT_S = 20.0
ANSWER_S = 600.0
"""Of any answer, should nobody have a shorter deadline."""
CLOSE_S = 2.0
_SCHEMA = "VALIDATION_ERROR"


class OpenEnvFailed(Exception):
    """The server answered with an error, or not at all."""


class OpenEnv(Environment):
    """A session of the server at `url`. A problem is the seed that the server is reset with.

    The text of a turn becomes the field `action` of the action, or without that field it is the action, as a JSON
    object. The policy sees the field `observation` of what comes back, or without that field all of it, as JSON.
    `prompt` opens the first message.
    """

    hints: ClassVar[Hints] = Hints(expected_turns=6, prompt_tokens=200, response_tokens=60)
    needs: ClassVar[Needs] = Needs(memory_mb=1)

    def __init__(self, url: str, action: str | None = None, observation: str | None = None, prompt: str = ""):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url ({url!r}) must begin with http:// or https://")
        self._url = f"{url.rstrip('/')}/ws"
        self._action, self._observation, self._prompt = action, observation, prompt
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._seed: int | None = None

    async def reset(self, problem: Problem) -> list[Message]:
        self._seed = seed_of(problem)
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S)
        self._session = aiohttp.ClientSession(timeout=timeout)
        close = aiohttp.ClientWSTimeout(ws_receive=ANSWER_S, ws_close=CLOSE_S)
        self._socket = await self._session.ws_connect(self._url, timeout=close, max_msg_size=0)
        data = await self._ask("reset", {"seed": self._seed})
        return [Message("user", "\n".join(filter(None, (self._prompt, self._told(data)))))]

    async def step(self, action: str) -> Step:
        fields = {self._action: action} if self._action else _object(action)
        if fields is None:
            return Step(Message("user", "an action is one JSON object"), error=Mistake.INVALID)
        try:
            data = await self._ask("step", fields)
        except _Unfit as error:
            if self._action:
                raise OpenEnvFailed(f"action ({self._action!r}) does not fit: {error}") from error
            return Step(Message("user", f"the action does not fit: {error}"), error=Mistake.INVALID)
        reward = data.get("reward")
        told = Message("user", self._told(data))
        return Step(
            told, None if reward is None else float(reward), bool(data["done"]), info=data.get("metadata") or {}
        )

    async def close(self) -> None:
        session, socket = self._session, self._socket
        self._session = self._socket = None
        try:
            if socket is not None:
                await socket.close()
        finally:
            if session is not None:
                await session.close()

    def fingerprint(self) -> object:
        return self._seed

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The data of the server's answer. Raises OpenEnvFailed, _Unfit."""
        if self._socket is None:
            raise OpenEnvFailed("there is no session: reset comes first, and nothing after close")
        await self._socket.send_json({"type": kind, "data": data})
        answer = await self._socket.receive()
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise OpenEnvFailed(f"no answer to {kind!r}: {answer.type.name} {answer.data or ''}")
        found = json.loads(answer.data)
        if found["type"] == "error":
            if found["data"].get("code") == _SCHEMA:
                wrong = found["data"]["errors"][0]
                raise _Unfit(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}")
            raise OpenEnvFailed(str(found["data"].get("message")))
        return found["data"]

    def _told(self, data: dict[str, Any]) -> str:
        observation = data["observation"]
        return str(observation[self._observation]) if self._observation else json.dumps(observation)


class _Unfit(Exception):
    """The action does not fit the server's schema."""


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
