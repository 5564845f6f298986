"""What Prefect's server is told and asked beside the work, and how little it may cost when it is away.

Invariants
- Beside the work the server is asked once and briefly; one that does not answer is left alone for a while.
- What the body of a flow ended with is its end, also when the server can not be told of it.
- A process outlives its work by `LEAVE_S` at most, whatever waits to be sent.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from time import monotonic
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.context import FlowRunContext, SettingsContext, get_settings_context
from prefect.events.worker import EventsWorker
from prefect.exceptions import CancelledRun, ObjectNotFound
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, Settings

from rl.errors import RollmillError

BRIEF_S = 10.0
AWAY_S = 30.0
"""How long a server that did not answer is left alone."""
LEAVE_S = 15.0

P = ParamSpec("P")
T = TypeVar("T")


class PrefectAway(RollmillError):
    """Prefect's server does not answer, so no flow can begin."""


_away = -AWAY_S
"""When it last did not answer, by the monotonic clock; negative if it always did."""


def ask(call: Callable[[], T]) -> T | None:
    """What the server answers; None where it is away, or knows nothing of what it is asked (somebody deleted it)."""
    global _away
    if monotonic() - _away < AWAY_S:
        return None
    context = get_settings_context()
    try:
        with SettingsContext(profile=context.profile, settings=_brief(context.settings)):
            return call()
    except (httpx.HTTPStatusError, ObjectNotFound):
        return None
    except httpx.HTTPError:
        _away = monotonic()
        return None


_made: tuple[Settings, Settings] | None = None


def _brief(settings: Settings) -> Settings:
    """These, for one short try; kept, for making them takes many milliseconds."""
    global _made
    if _made is None or _made[0] is not settings:
        brief = settings.copy_with_update({PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: BRIEF_S})
        _made = settings, brief
    return _made[1]


@dataclass
class _End(Generic[T]):
    """How the body of a flow ended, once it has."""

    over: bool = False
    """By returning `value`."""
    value: T | None = None
    error: Exception | None = None
    hurry: SettingsContext | None = None
    """In which Prefect's engine tells the end to a server that is away: by one try."""


_end: ContextVar[_End[Any] | None] = ContextVar("_end", default=None)


def noted(body: Callable[P, T]) -> Callable[P, T]:
    """The body of a flow that is called by `run_flow`."""

    @wraps(body)
    def noting(*arguments: P.args, **named: P.kwargs) -> T:
        end = _end.get() or _End[Any]()
        try:
            end.value = body(*arguments, **named)
        except Exception as error:
            end.error = error
            raise
        finally:
            context = FlowRunContext.get()
            if context is not None and isinstance(context.client, SyncPrefectClient):
                end.hurry = None if ask(context.client.hello) else _hurry()
        end.over = True
        return end.value

    return noting


def _hurry() -> SettingsContext:
    here = get_settings_context()
    return SettingsContext(profile=here.profile, settings=_brief(here.settings)).__enter__()


def run_flow(flow: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call a flow with a `noted` body. Raises PrefectAway when that can not begin, else what the body raises."""
    end = _End[T]()
    token = _end.set(end)
    try:
        return flow(*arguments, **named)
    except (httpx.HTTPError, ObjectNotFound, RuntimeError) as error:
        if end.error is not None:
            raise end.error from None
        if not _of_the_server(error):
            raise
        where = PREFECT_API_URL.value()
        if not end.over:
            raise PrefectAway(
                f"Prefect's server at {where} does not answer, and the flow can not begin; start it, and try again"
            ) from error
        missing = "has no such flow run any more" if isinstance(error, ObjectNotFound) else "does not answer"
        print(f"Prefect's server at {where} {missing}, and was not told that this ended", file=sys.stderr)
        return end.value  # type: ignore[return-value]
    finally:
        if end.hurry is not None:
            end.hurry.__exit__()
        _end.reset(token)


def _of_the_server(error: BaseException) -> bool:
    return isinstance(error, httpx.HTTPError | ObjectNotFound) or "Failed to reach API" in str(error)


def leave(code: str | int | None) -> NoReturn:
    """End this process as `SystemExit(code)` does, but in time, if need be without having sent everything."""
    sending = [threading.Thread(target=w.drain_all, args=(LEAVE_S,), daemon=True) for w in (EventsWorker, APILogWorker)]
    end_s = monotonic() + LEAVE_S
    if _away > 0:  # it was said; every line and event that can not be sent would say it again
        logging.disable()
        logging.raiseExceptions = False
    for thread in sending:
        thread.start()
    for thread in sending:
        thread.join(max(0.0, end_s - monotonic()))
    if monotonic() < end_s:
        raise SystemExit(code)
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def leaving(main: Callable[[], None]) -> NoReturn:
    """Run the `main` of a process, and `leave`."""
    code: str | int | None = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    except CancelledRun as end:
        code = str(end)
    except BaseException:
        traceback.print_exc()
        code = 1
    leave(code)
