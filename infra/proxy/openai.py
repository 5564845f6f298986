"""The form of OpenAI's API: what of its requests is taken, and its errors.

Invariant: a field is obeyed, or has no bearing on what is sampled and shown, or is refused by its name; none is
passed over in silence. Without influence here are `user`, `metadata`, `store`, `service_tier`, `safety_identifier`,
`prompt_cache_key` and a message's `name`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StrictBool, StrictInt, field_validator, model_validator
from starlette.responses import Response

from infra.proxy.http import Failure, answer

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
}
"""Fields that may only have the value at which they change nothing."""
Limit = Annotated[StrictInt, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool = False


class Request(BaseModel):
    """What both kinds of completion have in common."""

    model_config = ConfigDict(extra="forbid")

    model: str
    temperature: float | None = None
    """The session's, or not given."""
    max_tokens: Limit | None = None
    seed: StrictInt | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    """Ends the turn; what was sampled of it is recorded, and not told."""
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: StrictBool = False
    """Tell the sampled token ids, and those of the prompt, in the choice."""
    n: JsonValue = None
    best_of: JsonValue = None
    top_p: JsonValue = None
    presence_penalty: JsonValue = None
    frequency_penalty: JsonValue = None
    logit_bias: JsonValue = None
    user: JsonValue = None
    metadata: JsonValue = None
    store: JsonValue = None
    service_tier: JsonValue = None
    safety_identifier: JsonValue = None
    prompt_cache_key: JsonValue = None

    @field_validator(*NEUTRAL, check_fields=False)
    @classmethod
    def _neutral(cls, value: Any, info: Any) -> Any:
        if value is not None and value not in NEUTRAL[info.field_name]:
            raise ValueError(f"only {NEUTRAL[info.field_name][0]!r} is served, not {value!r}")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def limit(self) -> int | None:
        """Tokens that the turn may have, if it says so."""
        return self.max_tokens

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Request):
    """`POST /v1/completions`."""

    prompt: str | Annotated[list[StrictInt], Field(min_length=1)]
    """Text, in which control tokens are text; or tokens."""
    echo: StrictBool = False
    logprobs: Annotated[StrictInt, Field(ge=0, le=1)] | None = None
    """Of the sampled tokens."""
    suffix: JsonValue = None

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo and logprobs together are not served: a prompt has no log-probs here")
        return self


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Function(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: str


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(BaseModel):
    """One message; fields that are null are as if they were not there."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] = ""
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v is not None and not (k == "annotations" and v == [])}

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: dict[str, JsonValue]


class ChatRequest(Request):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Limit | None = None
    tools: list[FunctionTool] | None = None
    """Shown as they are given."""
    tool_choice: Literal["auto", "none"] | None = None
    """`none`: what looks like a call is text."""
    logprobs: StrictBool | None = None
    top_logprobs: JsonValue = None
    parallel_tool_calls: JsonValue = None
    response_format: JsonValue = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        return [tool.model_dump(mode="json") for tool in self.tools or ()]


def error_response(failure: Failure) -> Response:
    """A failure in the form that OpenAI's clients read: `code` is its name."""
    error = {
        "message": failure.detail,
        "type": _type(failure.status),
        "param": failure.field,
        "code": failure.name,
    }
    return answer({"error": error}, failure.status, failure.headers)


def _type(status: int) -> str:
    match status:
        case 401 | 403:
            return "authentication_error"
        case 429:
            return "rate_limit_error"
        case _ if status >= 500:
            return "server_error"
    return "invalid_request_error"
