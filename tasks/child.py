"""Child processes of a worker's task.

Invariants
- A child ends with its run (`infra.compute.signals`) and with its worker (`infra.compute.lifeline`).
- Its exit code tells what happened: 0 done, 3 fenced by another trainer, 4 a named error, else it crashed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event

from distributed import get_worker

from infra.compute.lifeline import FENCED, NAMED, reason, spawn, stop
from infra.compute.signals import follow
from rl.errors import Fenced, RollmillError

PERIOD_S = 0.2


class ProcessFailed(RollmillError):
    """A child process ended with a failure; the message is its last words, or the end of its log."""


class Crashed(ProcessFailed):
    """It ended without naming a reason (killed, out of memory): worth another start."""


class Unwanted(Crashed):
    """It was ended, because the run is no longer wanted."""


def supervise(
    run: str, module: Sequence[str], log: Path, threads: int, environment: Mapping[str, str] | None = None
) -> None:
    """Run `python -m module...` to its end, its output appended to `log`. Raises Fenced, ProcessFailed, Crashed
    (Unwanted when it was ended because the run is no longer wanted)."""
    ended = Event()
    # what the child tells MLflow it tells by itself: TRL need not import it for that, which takes seconds
    ours = {"OMP_NUM_THREADS": str(threads), "DISABLE_MLFLOW_INTEGRATION": "TRUE"}
    with follow(run, ended, get_worker().scheduler.address):
        child = spawn(module, log, {**ours, **(environment or {})})
        try:
            while child.poll() is None and not ended.wait(PERIOD_S):
                pass
        finally:
            told_to_stop = child.poll() is None
            code = stop(child)
    if told_to_stop:
        raise Unwanted(f"{module[0]} was ended: nobody renews the lease of {run}")
    if code == FENCED:
        raise Fenced(reason(log))
    if code == NAMED:
        raise ProcessFailed(reason(log))
    if code != 0:
        raise Crashed(f"{module[0]} ended with code {code}; {reason(log)}")
