"""One reply of a language model, over OpenAI's chat completions: what a judge asks.

Invariants: a reply or a named error within `DEADLINE_S`; temperature 0, as far as the server honours it (a session of
the proxy draws, and so has the lowest that it takes); the key comes from the environment or is the session's, and is
in no message.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

import httpx

from infra.proxy.client import ProxyClient
from infra.proxy.session_wire import Opened, SessionBody
from rl.config.rewards import JudgeSection
from rl.errors import DeadlineExceeded, RollmillError
from rl.trajectory import Message

DEADLINE_S = 120.0
CLOSE_S = 5.0
LOWEST_TEMPERATURE = 0.01
LONGEST = 1 << 20
"""Tokens of a session, question included: the engine knows its own bound."""
_PAUSE_S = 0.5
Ask = Callable[[Sequence[Message]], str]


class JudgeRefused(RollmillError):
    """The endpoint answers that this request can not be served, now or later."""


def chat_client(section: JudgeSection, deadline_s: float = DEADLINE_S, pause_s: float = _PAUSE_S) -> Ask:
    """A thread-safe function from a conversation to the next message of the model at `base_url`. It raises
    JudgeRefused, DeadlineExceeded."""
    assert section.base_url is not None
    url = f"{section.base_url.rstrip('/')}/chat/completions"
    key = os.environ.get(section.api_key_variable) if section.api_key_variable else None
    client = _http(key)
    body = {"model": section.model, "max_tokens": section.max_tokens, "temperature": 0}
    return lambda messages: _reply(client, url, body | _told(messages), deadline_s, pause_s)


def policy_client(section: JudgeSection, proxy: ProxyClient, tenant: str, deadline_s: float = DEADLINE_S) -> Ask:
    """The same for the policy that is served, in a session of the proxy for each reply; for threads without an event
    loop. It raises GenerationFailure, too."""

    def ask(messages: Sequence[Message]) -> str:
        return asyncio.run(_in_session(section, proxy, tenant, messages, deadline_s))

    return ask


async def _in_session(
    section: JudgeSection, proxy: ProxyClient, tenant: str, messages: Sequence[Message], deadline_s: float
) -> str:
    opening = SessionBody(
        trajectory=f"judge-{uuid.uuid4().hex}",
        tenant=tenant,
        domain="judge",
        start_version=0,
        evaluation=True,
        temperature=LOWEST_TEMPERATURE,
        max_new_tokens=section.max_tokens,
        max_tokens=LONGEST,
        max_turns=1,
        deadline_s=2 * deadline_s,
    )
    try:
        opened = await proxy.open_session(opening, deadline_s)
        try:
            return await asyncio.to_thread(_ask_once, opened, messages, deadline_s)
        finally:
            with suppress(RollmillError):  # it ends by itself
                await proxy.close_session(opened, CLOSE_S)
    finally:
        await proxy.close()


def _ask_once(opened: Opened, messages: Sequence[Message], deadline_s: float) -> str:
    with _http(opened.token) as client:
        body = {"model": opened.model} | _told(messages)
        return _reply(client, f"{opened.base_url}/chat/completions", body, deadline_s, _PAUSE_S)


def _http(key: str | None) -> httpx.Client:
    return httpx.Client(headers={"Authorization": f"Bearer {key}"} if key else {}, trust_env=False)


def _told(messages: Sequence[Message]) -> dict[str, Any]:
    return {"messages": [{"role": m.role, "content": m.content} for m in messages]}


def _reply(client: httpx.Client, url: str, body: dict[str, Any], deadline_s: float, pause_s: float) -> str:
    """What the model says. Raises JudgeRefused, DeadlineExceeded."""
    end = monotonic() + deadline_s
    why = "nothing was asked"
    while (left := end - monotonic()) > 0:
        try:
            answer = client.post(url, json=body, timeout=left)
            if answer.status_code == 200:
                return str(answer.json()["choices"][0]["message"]["content"])
            why = f"HTTP {answer.status_code}: {answer.text[:200]}"
            if answer.status_code < 500 and answer.status_code not in (408, 429):
                raise JudgeRefused(f"judge.base_url: {url} refuses: {why}")
        except httpx.TransportError as error:
            why = str(error) or type(error).__name__
        except (ValueError, LookupError, TypeError) as error:
            raise JudgeRefused(f"judge.base_url: {url} answers no chat completion: {error!r}") from error
        sleep(min(pause_s, max(0.0, end - monotonic())))
    raise DeadlineExceeded(f"judge.base_url: no reply from {url} within {deadline_s:g} s; last: {why}")
