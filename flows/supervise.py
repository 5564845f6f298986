"""One part of a run as a process: started, watched, started again within its budget.

Invariant: a part that ended with a named error (exit code 4) is not started again: the error is the run's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from subprocess import TimeoutExpired

from rich.console import Console

from infra.compute.lifeline import spawn, stop, tail
from rl.errors import DeadlineExceeded, RollmillError

NAMED = 4


class PartFailed(RollmillError):
    """A part of the run ended by name, or died more often than its budget allows."""


class Part:
    """A supervised process, `python -m module...`."""

    def __init__(self, name: str, module: Sequence[str], log: Path, restarts: int):
        self.name, self._module, self.log, self._left = name, module, log, restarts
        self.process = spawn(module, log)

    def check(self, console: Console) -> None:
        """Start the process again if it died. Raises PartFailed when that is no use."""
        code = self.process.poll()
        if code is None or code == 0:
            return
        if code == NAMED:
            raise PartFailed(tail(self.log, 1))
        if self._left == 0:
            raise PartFailed(
                f"{self.name} died again (code {code}) and its budget (restarts) is spent; the end of {self.log}:\n"
                f"{tail(self.log)}"
            )
        self._left -= 1
        console.print(f"{self.name} died (code {code}): started again, {self._left} restarts left", highlight=False)
        self.stop()
        self.process = spawn(self._module, self.log)

    def finish(self, deadline_s: float) -> None:
        """Wait for its natural end. Raises DeadlineExceeded, PartFailed."""
        try:
            code = self.process.wait(deadline_s)
        except TimeoutExpired as error:
            raise DeadlineExceeded(f"{self.name} did not end within {deadline_s:g} s after the last version") from error
        if code != 0:
            raise PartFailed(f"{self.name} ended with code {code}: {tail(self.log, 1)}")

    def stop(self) -> None:
        stop(self.process)
