"""Calls into code that is not ours, on the event loop.

Invariant: `bounded` ends at its deadline even when the call ignores its cancellation, and whatever the call raises,
an exit included, is an ordinary exception here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class Overdue(Exception):
    """A call ran past its deadline; it was cancelled, and its outcome interests nobody any more."""


class Exited(Exception):
    """A call raised SystemExit or the like, or cancelled itself."""


async def bounded(call: Awaitable[T], deadline_s: float) -> T:
    """What the call returns or raises. Raises Overdue, Exited. (`asyncio.timeout` would wait for a call that
    swallows its cancellation.)"""
    task = asyncio.ensure_future(_tamed(call))
    try:
        await asyncio.wait({task}, timeout=deadline_s)
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(lambda late: late.cancelled() or late.exception())  # or asyncio prints it
    if not task.done():
        raise Overdue
    if task.cancelled():
        raise Exited("it cancelled itself")
    return task.result()


async def _tamed(call: Awaitable[T]) -> T:
    try:
        return await call
    except (SystemExit, KeyboardInterrupt) as error:  # asyncio would end the worker with it
        raise Exited(f"it raised {error!r}") from error
