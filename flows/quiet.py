"""One line per failure on the console: Prefect's own loggers print tracebacks of errors that have names.

Invariant: a traceback is shown only for what has no name; the full one of a named error is in Prefect's log.
"""

from __future__ import annotations

import logging

from rl.errors import RollmillError


class _NamedInOneLine(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, RollmillError):
            record.exc_info, record.exc_text = None, None
            record.msg, record.args = f"{type(error).__name__}: {error}", ()
        return True


def quiet_failures() -> None:
    """Install the filter on the loggers of Prefect's engines. Idempotent."""
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logger = logging.getLogger(name)
        if not any(isinstance(f, _NamedInOneLine) for f in logger.filters):
            logger.addFilter(_NamedInOneLine())
