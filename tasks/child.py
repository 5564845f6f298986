"""Child processes of a worker's task.

Invariants
- A child ends with its run (`infra.compute.signals`) and with its worker (`infra.compute.lifeline`).
- Its exit code tells what happened: 0 done, 3 fenced by another trainer, 4 a named error, else it crashed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Event

from distributed import get_worker

from infra.compute.lifeline import spawn, stop, tail
from infra.compute.signals import follow
from rl.errors import Fenced, RollmillError

FENCED, NAMED = 3, 4
PERIOD_S = 0.2


class ProcessFailed(RollmillError):
    """A child process ended with a failure; the message carries the end of its log."""


class Crashed(ProcessFailed):
    """It ended without naming a reason (killed, out of memory): worth another start."""


def supervise(run: str, module: Sequence[str], log: Path, threads: int) -> None:
    """Run `python -m module...` to its end, its output appended to `log`. Raises Fenced, ProcessFailed, Crashed;
    returns when it is done or the run was told to stop."""
    ended = Event()
    with follow(run, ended, get_worker().scheduler.address):
        child = spawn(module, log, {"OMP_NUM_THREADS": str(threads)})
        try:
            while child.poll() is None and not ended.wait(PERIOD_S):
                pass
        finally:
            told_to_stop = child.poll() is None
            code = stop(child)
    if code == 0 or told_to_stop:
        return
    if code == FENCED:
        raise Fenced(tail(log, 1))
    if code == NAMED:
        raise ProcessFailed(tail(log, 1))
    raise Crashed(f"{module[0]} ended with code {code}; the end of {log}:\n{tail(log)}")


def config_file(config_json: str, work_dir: str) -> str:
    """The configuration as a file that a child reads."""
    path = Path(work_dir) / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(config_json)
    return str(path)
