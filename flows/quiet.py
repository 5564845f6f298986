"""One line per failure on the console: Prefect prints tracebacks of errors that have names.

Invariant: a traceback is shown only for what has no name; the full one of a named error is in Prefect's log.
"""

from __future__ import annotations

import logging
import sys
import threading

from rl.errors import RollmillError

FLUSH_S = 15.0


class _WithoutNamed(logging.Filter):
    """Holds back named errors: whoever runs the flow tells them in one line."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], RollmillError))


def quiet_failures() -> None:
    """Install the filter on the console's handlers; call after Prefect was imported. Idempotent."""
    for handler in logging.getLogger().handlers:
        if not any(isinstance(f, _WithoutNamed) for f in handler.filters):
            handler.addFilter(_WithoutNamed())


def flush() -> None:
    """Send the logs and events that wait for Prefect's server; call before that server is stopped."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        for handler in logging.getLogger(name).handlers:
            handler.flush()
    if (worker := sys.modules.get("prefect.events.worker")) is not None:
        sending = threading.Thread(target=worker.EventsWorker.drain_all, args=(FLUSH_S,))  # a notebook's has a loop
        sending.start()
        sending.join()
