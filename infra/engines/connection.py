"""Work for a client that may go away.

Invariants
- It is done in the task of its request, which costs no other, and ends when the client goes away.
- A cancellation from elsewhere stays one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from rl.errors import RollmillError

T = TypeVar("T")


class Gone(RollmillError):
    """The client went away while it waited."""


async def disconnected(receive: Receive) -> None:
    """Return once the client has gone away; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; the body must have been read. Raises Gone, and what `work` raises."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        await disconnected(receive)
        gone = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
        raise Gone("the client went away") from None
    finally:
        watcher.cancel()
