"""JSON in and out, and the name of every failure: what all families of routes share.

Invariants: every answer made here is JSON; every failure has a name, a status and a detail; a POST whose content type
is not application/json gets 415, so that a page in somebody's browser can not send one (a browser asks first, and
gets no permission here).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from infra.chat import UnfitConversation
from infra.engines.connection import Gone
from infra.engines.errors import BadRequest, EngineClosed, PromptTooLong, UnknownPolicy
from infra.proxy.control import UnknownFence
from infra.proxy.refusals import Denied, Refused
from infra.proxy.versions import UnknownVersion
from infra.store.errors import StoreUnavailable
from rl.errors import Fenced, GenerationFailure, RollmillError

B = TypeVar("B", bound=BaseModel)
Endpoint = Callable[[Request], Awaitable[Response]]
RETRY_AFTER_S = "1"
GONE = 499
"""Status of an answer that nobody reads: the client closed the connection."""

logger = logging.getLogger(__name__)


class NotJson(RollmillError):
    """A request whose content type is not that of JSON."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a client is told of an error."""

    name: str
    status: int
    detail: str
    field: str | None = None

    @classmethod
    def of(cls, error: Exception) -> Failure:
        name, status = _name(error)
        detail, field = str(error), None
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "body"
            detail = f"{field}: {first['msg']}"
        if name == "internal":
            detail = f"{type(error).__name__}: {error}"
        return cls(name, status, detail, field)

    @property
    def headers(self) -> dict[str, str] | None:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": RETRY_AFTER_S} if self.status in (429, 503) else None

    def response(self) -> Response:
        content = {"error": self.name, "detail": self.detail}
        if self.field is not None:
            content["field"] = self.field
        return answer(content, self.status, self.headers)


def _name(error: Exception) -> tuple[str, int]:
    """Name and status of a failure."""
    match error:
        case Denied():
            return error.name, error.status
        case Refused(reason="unavailable") | EngineClosed() | StoreUnavailable():
            return "unavailable", 503
        case Refused():
            return error.reason, 409
        case Fenced():
            return "fenced", 403
        case NotJson():
            return "unsupported_media_type", 415
        case UnknownFence():
            return "unknown_fence", 404
        case UnknownVersion():
            return "unknown_version", 404
        case UnknownPolicy():
            return "unknown_policy", 422
        case PromptTooLong():
            return "prompt_too_long", 422
        case UnfitConversation():
            return "unfit_conversation", 422
        case BadRequest() | ValidationError():
            return "bad_request", 422
        case ClientDisconnect() | Gone():
            return "disconnected", GONE
        case GenerationFailure():
            return "unavailable", 503
        case RollmillError():
            return type(error).__name__, 500
    return "internal", 500


def post(path: str, endpoint: Endpoint, tell: Callable[[Failure], Response] = Failure.response) -> Route:
    """A POST route whose failures are answered by name, in the form that `tell` gives them."""

    async def typed(request: Request) -> Response:
        check_type(request)
        return await endpoint(request)

    return route(path, "POST", typed, tell)


def route(
    path: str, method: str, endpoint: Endpoint, tell: Callable[[Failure], Response] = Failure.response
) -> Route:
    """A route whose failures are answered by name."""

    async def named(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Exception as error:
            failure = Failure.of(error)
            if failure.name == "internal":
                logger.error("a request failed", exc_info=error)
            return tell(failure)

    return Route(path, named, methods=[method])


def check_type(request: Request) -> None:
    """Raise NotJson unless the request says that it holds JSON."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise NotJson(f"the content type is {given!r}; send JSON, as application/json")


async def read(request: Request, model: type[B]) -> B:
    """The body as this model. Raises BadRequest, ValidationError."""
    try:
        content = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    return model.model_validate(content)


def answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(orjson.dumps(content), status, headers, "application/json")
