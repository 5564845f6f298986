"""A thread for work beside a flow, such as what can be begun anew when it is cut off.

Invariants: one piece at a time, in the order in which they were handed in; whoever closes it waits no longer than it
says, and what hangs then ends with the process, for the thread is a daemon (an executor's would hold that up).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Beside:
    """Started with its first piece of work."""

    def __init__(self, name: str):
        self._handed_in: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._handed_in.put((future, work))
        if not self._thread.is_alive():
            self._thread.start()
        return future

    def close(self, within_s: float) -> bool:
        """Cancel what was not begun and wait for what was; whether that has ended. Once, and nothing is handed in
        afterwards."""
        with suppress(Empty):
            while (found := self._handed_in.get_nowait()) is not None:
                found[0].cancel()
        self._handed_in.put(None)
        if self._thread.is_alive():
            self._thread.join(within_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (found := self._handed_in.get()) is not None:
            future, work = found
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
