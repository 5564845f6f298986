"""`POST /v1/chat/completions`: messages in, one message out, with tools.

Invariants
- A message that the agent sends back as it was told stands for the tokens that were sampled; it is never tokenised.
- Tools are shown by the model's own template. Calls are read in the form of Hermes and Qwen (`rl.calls`); a turn in
  which they can not be read as a whole is told as text, and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from infra.chat import ChatCodec, UnfitConversation
from infra.engines.errors import BadRequest
from infra.proxy.agents import agent_post, envelope, events, sampled, usage
from infra.proxy.http import answer
from infra.proxy.openai import ChatMessage, ChatRequest
from infra.proxy.sessions import Ask, Heard, Session, Sessions
from rl.calls import CLOSE, OPEN, THOUGHT, Unreadable, read_calls
from rl.sessions import Said, SaidCall
from rl.trajectory import Message


def routes(sessions: Sessions) -> list[Route]:
    """Of one proxy."""

    async def complete(request: HttpRequest, session: Session, asked: ChatRequest) -> Response:
        heard = await sampled(sessions, request, session, _ask(sessions.codec, asked))
        told = _hear(asked, heard.text)
        if asked.tool_choice != "none" and not told.calls and (OPEN in told.content or CLOSE in told.content):
            sessions.proxy.metrics.unreadable.labels(session.body.tenant, session.body.domain).inc()
        model = sessions.proxy.config.name
        if asked.stream:
            around = envelope("chat.completion.chunk", "chatcmpl", session, model, heard)
            return events(_chunks(sessions.codec, around, asked, heard, told))
        around = envelope("chat.completion", "chatcmpl", session, model, heard)
        choice = {"index": 0, "message": _message(told, heard), **_end(sessions.codec, asked, heard, told)}
        return answer({**around, "choices": [choice], "usage": usage(heard)})

    return [agent_post(sessions, "/v1/chat/completions", ChatRequest, complete)]


def _ask(codec: ChatCodec, asked: ChatRequest) -> Ask:
    """Raises BadRequest, UnfitConversation."""
    said = tuple(_said(message) for message in asked.messages)
    if said[-1].role == "assistant":
        raise BadRequest("messages: the last one is the model's own; a turn follows a message of somebody else")
    tools = asked.shown_tools
    if tools and not codec.shows_tools:
        raise UnfitConversation("tools: the chat template of this policy does not show any; leave them away")

    def encode(known: int) -> list[int]:
        if any(one.calls for one in said[known:]) and not codec.shows_calls:
            raise UnfitConversation("messages: the chat template of this policy writes no tool_calls; say them as text")
        return codec.conversation(said, tools, known)

    return Ask(
        said,
        ("chat", json.dumps(tools, sort_keys=True)),
        encode,
        lambda known: [_readable(one) for one in said[known:]],
        lambda told, text, tokens: (*said, _hear(asked, told)),
        True,
        asked.limit,
        asked.stops,
        asked.seed,
    )


def _said(message: ChatMessage) -> Said:
    if message.tool_calls and message.role != "assistant":
        raise BadRequest(f"messages: tool_calls in a message of {message.role}; only the assistant makes calls")
    role = "system" if message.role == "developer" else message.role
    calls = tuple(SaidCall(call.function.name, call.function.arguments) for call in message.tool_calls)
    return Said(role, message.text, calls)


def _readable(said: Said) -> Message:
    calls = (f'{OPEN}\n{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}\n{CLOSE}' for c in said.calls)
    return Message(said.role, "\n".join([*([said.content] if said.content else []), *calls]))


def _hear(asked: ChatRequest, text: str) -> Said:
    """The message that the agent is told."""
    try:
        calls = read_calls(text) if asked.tool_choice != "none" else []
    except Unreadable:
        calls = []
    if not calls:
        return Said("assistant", text)
    before = text[: text.index(OPEN, max(0, text.rfind(THOUGHT)))].rstrip()
    made = (SaidCall(call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in calls)
    return Said("assistant", before, tuple(made))


def _message(told: Said, heard: Heard) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": told.content, "refusal": None}
    if told.calls:
        message["content"] = told.content or None
        message["tool_calls"] = _calls(told, heard)
    return message


def _calls(told: Said, heard: Heard) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{heard.turn.number}_{at}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for at, call in enumerate(told.calls)
    ]


def _end(codec: ChatCodec, asked: ChatRequest, heard: Heard, told: Said) -> dict[str, Any]:
    """What a choice has beside its message."""
    turn = heard.turn
    reason = "tool_calls" if told.calls and turn.finish_reason == "stop" else turn.finish_reason
    end: dict[str, Any] = {"finish_reason": reason, "logprobs": None}
    if asked.logprobs:
        shown = zip(turn.token_ids, turn.logprobs, strict=True)
        content = [_logprob(codec, token, logprob) for token, logprob in shown if token not in codec.stop_token_ids]
        end["logprobs"] = {"content": content, "refusal": None}
    if asked.return_token_ids:
        end |= {"token_ids": turn.token_ids, "prompt_token_ids": turn.prompt}
    return end


def _logprob(codec: ChatCodec, token: int, logprob: float) -> dict[str, Any]:
    text = codec.decode([token])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


def _chunks(
    codec: ChatCodec, around: dict[str, Any], asked: ChatRequest, heard: Heard, told: Said
) -> Iterator[dict[str, Any]]:
    counted: dict[str, Any] = {"usage": None} if asked.wants_usage else {}

    def chunk(delta: dict[str, Any], **end: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None, **end}
        return {**around, "choices": [choice], **counted}

    yield chunk({"role": "assistant", "content": ""})
    if told.content:
        yield chunk({"content": told.content})
    if told.calls:
        yield chunk({"tool_calls": [{"index": at, **call} for at, call in enumerate(_calls(told, heard))]})
    yield chunk({}, **_end(codec, asked, heard, told))
    if asked.wants_usage:
        yield {**around, "choices": [], "usage": usage(heard)}
