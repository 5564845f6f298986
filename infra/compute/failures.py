"""Whatever went wrong in a stage, as a failure with a name."""

from __future__ import annotations

from distributed.scheduler import KilledWorker

from rl.errors import StageFailure


def named(cause: BaseException) -> StageFailure:
    """The cause itself if it has a name."""
    if isinstance(cause, StageFailure):
        return cause
    if isinstance(cause, KilledWorker):
        return StageFailure(f"its workers died: {cause}")
    return StageFailure(f"{type(cause).__name__}: {cause}")
