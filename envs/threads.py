"""Blocking work beside an event loop, in threads that nothing ever waits for.

Invariants
- A thread that hangs delays neither the loop, nor anybody else's work, nor the end of the process: it is a daemon
  and belongs to one lane, not to a shared pool.
- The calls of one lane run one after the other, all in one thread, so that thread-bound things (an SQLite
  connection, say) may live in it.
- The thread ends with its lane, or when that is forgotten, after what was asked of it.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class ExitInThread(Exception):
    """Blocking work raised SystemExit or the like, which in an event loop would end the worker."""


class Lane:
    """One daemon thread, started at the first call."""

    def __init__(self, name: str):
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._pending = 0
        self._end: Callable[[], object] | None = None

    @property
    def busy(self) -> bool:
        """Whether a call has not ended; once its caller gave up on it, that it hangs."""
        return self._pending > 0

    async def call(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. Cancelling gives up on it; the thread goes on."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
            if not done.done():  # else nobody waits any more
                set_outcome(outcome)

        outcome: list[tuple[Callable[[Any], None], Any]] = []

        def job() -> None:
            try:
                outcome.append((done.set_result, work()))
            except StopIteration as error:  # a future refuses it
                outcome.append((done.set_exception, RuntimeError(f"it raised {error!r}")))
            except Exception as error:
                outcome.append((done.set_exception, error))
            except BaseException as error:
                outcome.append((done.set_exception, ExitInThread(f"it raised {type(error).__name__}: {error}")))

        def tell() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, *outcome.pop())

        self._queue(job, tell)
        return await done

    def end(self) -> None:
        """Let the thread end after what was asked of it, without waiting until the lane is forgotten."""
        if self._end is not None:
            self._end()

    def post(self, work: Callable[[], object]) -> None:
        """Queue `work` without waiting for it; what it raises is lost."""
        self._queue(work, lambda: None)

    def _queue(self, work: Callable[[], object], then: Callable[[], None]) -> None:
        """`then` comes when the lane is not busy with `work` any more: whoever it wakes sees that."""
        if self._end is None:
            self._end = weakref.finalize(self, self._jobs.put, None)
            threading.Thread(target=_serve, args=(self._jobs,), name=self._name, daemon=True).start()
        counted = weakref.ref(self)  # a lane that its own queue held would never be forgotten

        def job() -> None:
            try:
                with suppress(Exception):
                    work()
            finally:
                if (lane := counted()) is not None:
                    lane._pending -= 1
                then()

        self._pending += 1
        self._jobs.put(job)


def _serve(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        job()
        del job  # or the thread would hold what the last one held, and so perhaps its own lane


async def in_daemon(work: Callable[[], T], name: str) -> T:
    """What `work` returns or raises, in a thread of its own."""
    lane = Lane(name)
    try:
        return await lane.call(work)
    finally:
        lane.end()
