"""The stop signal of a run: how long tasks learn that they shall end.

Invariant: `future.cancel()` does not stop a running task, so every long task follows this signal; losing the
scheduler counts as being told to stop, so that nothing outlives its cluster.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from distributed import Client, Variable

PERIOD_S = 0.5
LOST_S = 30.0


def announce_stop(client: Client, run: str, stopped: bool = True) -> None:
    """Set or clear the stop signal of a run."""
    Variable(_name(run), client=client).set(stopped)


@contextmanager
def follow(run: str, stop: threading.Event, scheduler: str) -> Iterator[None]:
    """Set `stop` when the run's signal is set or the scheduler is gone, for the duration of the block."""
    done = threading.Event()

    def watch() -> None:
        try:
            with Client(scheduler, set_as_default=False, timeout=LOST_S) as client:
                signal = Variable(_name(run), client=client)
                while not done.wait(PERIOD_S):
                    if client.status != "running" or signal.get(timeout=LOST_S):
                        break
        except Exception:  # whatever the reason, the cluster does not answer
            pass
        stop.set()

    watcher = threading.Thread(target=watch, name=f"stop-signal-{run}", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()


def _name(run: str) -> str:
    return f"rollmill-stop-{run}"
