"""Whether a run is wanted: how long tasks learn that they shall end.

`future.cancel()` does not stop a running task, so every long task follows this signal. It is a lease: the driver
of the run renews it, and what is not renewed has ended.

Invariant: a task that follows ends within `LEASE_S` of the driver's end, whatever ended the driver, and of the
loss of its scheduler: nothing outlives its run, on a cluster of one's own or of somebody else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from time import monotonic

from distributed import Client, Variable

RENEW_S = 1.0
LOOK_S = 0.5
LEASE_S = 30.0
STOP = "stop"


@contextmanager
def wanted(client: Client, run: str) -> Iterator[None]:
    """Hold the lease of a run for the duration of the block; leaving it tells everything to stop."""
    lease, done = Variable(_name(run), client=client), threading.Event()

    def renew() -> None:
        for beat in count():
            with suppress(Exception):  # a scheduler that is away for a moment: the lease outlasts it
                lease.set(beat, timeout=LEASE_S)
            if done.wait(RENEW_S):
                return

    lease.set(0, timeout=LEASE_S)
    beating = threading.Thread(target=renew, name=f"lease-{run}", daemon=True)
    beating.start()
    try:
        yield
    finally:
        done.set()
        beating.join(LEASE_S)
        with suppress(Exception):  # without a scheduler the followers know by themselves
            lease.set(STOP, timeout=LEASE_S)


@contextmanager
def follow(run: str, stop: threading.Event, scheduler: str) -> Iterator[None]:
    """Set `stop` when the run is no longer wanted, or the block ends. All that follow one run in one process share one
    connection."""
    key = (run, scheduler)
    with _LOCK:
        watch = _WATCHES.get(key)
        if watch is None or watch.over:
            watch = _WATCHES[key] = _Watch(run, scheduler)
            threading.Thread(target=watch.run, name=f"follow-{run}", daemon=True).start()
        watch.stops.append(stop)
    try:
        yield
    finally:
        with _LOCK:
            watch.stops.remove(stop)
            stop.set()
            if not watch.stops and not watch.over:
                watch.over = True
                watch.done.set()


class _Watch:
    """One lease that is watched for all that follow it."""

    def __init__(self, run: str, scheduler: str):
        self._run, self._scheduler = run, scheduler
        self.stops: list[threading.Event] = []
        self.done = threading.Event()
        self.over = False
        """Whether whoever comes now needs another one."""

    def run(self) -> None:
        with suppress(Exception):  # the scheduler is gone for good
            _until_unwanted(self._run, self._scheduler, self.done)
        with _LOCK:
            self.over = True
            for stop in self.stops:
                stop.set()


_LOCK = threading.Lock()
_WATCHES: dict[tuple[str, str], _Watch] = {}


def _until_unwanted(run: str, scheduler: str, done: threading.Event) -> None:
    with Client(scheduler, set_as_default=False, timeout=LEASE_S) as client:
        lease = Variable(_name(run), client=client)
        last, renewed = None, monotonic()
        while not done.wait(LOOK_S) and monotonic() - renewed < LEASE_S:
            with suppress(TimeoutError):
                beat = lease.get(timeout=LEASE_S / 3)
                if beat == STOP:
                    return
                if beat != last:
                    last, renewed = beat, monotonic()


def _name(run: str) -> str:
    return f"rollmill-lease-{run}"
