"""`POST /v1/completions` and `GET /v1/models`: text or tokens in, text out.

Invariant: a prompt that begins with an earlier prompt and what was sampled for it, text by text or token by token,
stands for the tokens recorded there; only what follows is tokenised. In text control tokens are text: who needs
them sends tokens.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from infra.chat import ChatCodec
from infra.proxy.agents import agent_post, envelope, events, sampled, session_of, usage
from infra.proxy.http import answer, route
from infra.proxy.openai import CompletionRequest, error_response
from infra.proxy.refusals import Denied
from infra.proxy.sessions import Ask, Heard, Session, Sessions
from rl.trajectory import Message


def routes(sessions: Sessions) -> list[Route]:
    """Of one proxy."""

    async def complete(request: HttpRequest, session: Session, asked: CompletionRequest) -> Response:
        codec = sessions.codec
        prompt = asked.prompt
        if isinstance(prompt, str):
            ask, text = _of_text(codec, asked, prompt), prompt
        else:
            ask, text = _of_tokens(codec, asked, tuple(prompt)), codec.decode(prompt)
        heard = await sampled(sessions, request, session, ask)
        text = text if asked.echo else ""
        choice = {"index": 0, "text": text + heard.text, **_end(codec, asked, heard)}
        around = envelope("text_completion", "cmpl", session, sessions.proxy.config.name, heard)
        if not asked.stream:
            return answer({**around, "choices": [choice], "usage": usage(heard)})
        counted: dict[str, Any] = {"usage": None} if asked.wants_usage else {}
        last = [{**around, "choices": [], "usage": usage(heard)}] if asked.wants_usage else []
        return events([{**around, "choices": [choice], **counted}, *last])

    async def models(request: HttpRequest) -> Response:
        session_of(sessions, request)
        return answer({"object": "list", "data": [_model(sessions)]})

    async def model(request: HttpRequest) -> Response:
        session_of(sessions, request)
        if (name := request.path_params["model"]) != sessions.proxy.config.name:
            raise Denied("model_not_found", 404, f"model: {name!r} is not served here")
        return answer(_model(sessions))

    return [
        agent_post(sessions, "/v1/completions", CompletionRequest, complete),
        route("/v1/models", "GET", models, error_response),
        route("/v1/models/{model}", "GET", model, error_response),
    ]


def _model(sessions: Sessions) -> dict[str, Any]:
    return {"id": sessions.proxy.config.name, "object": "model", "created": 0, "owned_by": "rollmill"}


def _of_text(codec: ChatCodec, asked: CompletionRequest, prompt: str) -> Ask:
    return Ask(
        prompt,
        "text",
        lambda known: codec.text(prompt[known:]),
        lambda known: [Message("user", prompt[known:])],
        lambda told, text, tokens: prompt + text,
        False,
        asked.limit,
        asked.stops,
        asked.seed,
    )


def _of_tokens(codec: ChatCodec, asked: CompletionRequest, prompt: tuple[int, ...]) -> Ask:
    return Ask(
        prompt,
        "tokens",
        lambda known: list(prompt[known:]),
        lambda known: [Message("user", codec.decode(prompt[known:]))],
        lambda told, text, tokens: (*prompt, *tokens),
        False,
        asked.limit,
        asked.stops,
        asked.seed,
    )


def _end(codec: ChatCodec, asked: CompletionRequest, heard: Heard) -> dict[str, Any]:
    turn = heard.turn
    end: dict[str, Any] = {"finish_reason": turn.finish_reason, "logprobs": None}
    if asked.logprobs is not None:
        texts = [codec.decode([token]) for token in turn.token_ids]
        offsets, at = [], 0
        for text in texts:
            offsets.append(at)
            at += len(text)
        end["logprobs"] = {
            "tokens": texts,
            "token_logprobs": turn.logprobs,
            "top_logprobs": None,
            "text_offset": offsets,
        }
    if asked.return_token_ids:
        end |= {"token_ids": turn.token_ids, "prompt_token_ids": turn.prompt}
    return end
