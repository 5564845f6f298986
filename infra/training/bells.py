"""Wakes the desks for whose jobs something arrived, so that none has to ask the store again and again.

Invariants: a bell that rang stays so until its desk has heard it, whenever it was; nobody relies on one (see
`infra.store.arrivals`); one request for all desks, and none where there is no desk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping


class Bells:
    """By job. `look` gives what changes when something arrives for a job; thread-safe but for `listen`, which is one
    thread's."""

    def __init__(self, look: Callable[[], Mapping[str, Hashable]]) -> None:
        self._look = look
        self._known: Mapping[str, Hashable] = {}
        self._bells: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def hang(self, id: str) -> threading.Event:
        """The bell of a job, from now on."""
        bell = threading.Event()
        with self._lock:
            self._bells[id] = bell
        return bell

    def take_down(self, id: str, bell: threading.Event) -> None:
        """Unless another one hangs there already."""
        with self._lock:
            if self._bells.get(id) is bell:
                del self._bells[id]

    def listen(self) -> None:
        """Ring for what arrived since the last time. Raises a StoreError."""
        if not self._bells:
            return
        found = self._look()
        changed = [id for id, value in found.items() if self._known.get(id) != value]
        self._known = found
        with self._lock:
            for id in changed:
                if (bell := self._bells.get(id)) is not None:
                    bell.set()
