"""One reply of a language model, over OpenAI's chat completions: what a judge asks.

Invariants: a reply or a named error within `DEADLINE_S`; temperature 0, as far as the server honours it; the key comes
from the environment and is in no message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from time import monotonic, sleep

import httpx

from rl.config.rewards import JudgeSection
from rl.errors import DeadlineExceeded, RollmillError
from rl.trajectory import Message

DEADLINE_S = 120.0
_PAUSE_S = 0.5


class JudgeRefused(RollmillError):
    """The endpoint answers that this request can not be served, now or later."""


def chat_client(
    section: JudgeSection, deadline_s: float = DEADLINE_S, pause_s: float = _PAUSE_S
) -> Callable[[Sequence[Message]], str]:
    """A thread-safe function from a conversation to the next message. It raises JudgeRefused, DeadlineExceeded."""
    url = f"{section.base_url.rstrip('/')}/chat/completions"
    key = os.environ.get(section.api_key_variable) if section.api_key_variable else None
    client = httpx.Client(headers={"Authorization": f"Bearer {key}"} if key else {}, trust_env=False)

    def ask(messages: Sequence[Message]) -> str:
        body = {
            "model": section.model,
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            "max_tokens": section.max_tokens,
            "temperature": 0,
        }
        end = monotonic() + deadline_s
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

    return ask
