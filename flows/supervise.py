"""One part of a run as a process: started, watched, started again within its budget.

Invariant: a part that ended with a named error (exit code 4) is not started again: the error is the run's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep

from rich.console import Console

from infra.compute.lifeline import NAMED, reason, spawn, stop
from rl.errors import DeadlineExceeded, RollmillError

PAUSE_S = 1.0
"""Before a part is started again: what killed it may still be going on."""
PERIOD_S = 0.2


class PartFailed(RollmillError):
    """A part of the run ended by name, or died more often than its budget allows."""


class Part:
    """A supervised process, `python -m module...`."""

    def __init__(
        self,
        name: str,
        module: Sequence[str],
        log: Path,
        restarts: int,
        environment: Mapping[str, str] | None = None,
        look: Callable[[bool], None] = lambda died: None,
    ):
        """`look(died)` is called at every check, with whether the process died; it may raise."""
        self.name, self._module, self.log, self._left = name, module, log, restarts
        self._environment, self._look = environment, look
        self.process = spawn(module, log, environment)

    @property
    def done(self) -> bool:
        """Whether it ended, and well."""
        return self.process.poll() == 0

    def check(self, console: Console) -> None:
        """Start the process again if it died. Raises PartFailed when that is no use."""
        code = self.process.poll()
        self._look(died := code not in (None, 0))
        if not died:
            return
        if code == NAMED:
            raise PartFailed(reason(self.log))
        if self._left == 0:
            raise PartFailed(
                f"{self.name} died again (code {code}) and its budget (restarts) is spent; {reason(self.log)}"
            )
        self._left -= 1
        console.print(f"{self.name} died (code {code}): started again, {self._left} restarts left", highlight=False)
        self.stop()
        sleep(PAUSE_S)
        self.process = spawn(self._module, self.log, self._environment)

    def finish(self, console: Console, deadline_s: float) -> None:
        """Wait for its natural end, starting it again if it dies on the way. Raises DeadlineExceeded, PartFailed."""
        end = monotonic() + deadline_s
        while not self.done:
            self.check(console)
            if monotonic() > end:
                raise DeadlineExceeded(f"{self.name} did not end within {deadline_s:g} s after the last version")
            sleep(PERIOD_S)

    def stop(self) -> None:
        stop(self.process)
