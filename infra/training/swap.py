"""Phases SUSPEND, UPDATE, RESUME: bring the engines to a version.

Invariants
- A suspend is paired with a resume, whatever happens in between, as far as the proxy can be reached.
- A proxy that does not answer, or does not know yet that the job runs, is tried again, from SUSPEND on, until
  `deadlines.control`; one that is away may be starting anew and gets `deadlines.start` on top. Then there is a named
  error. Being fenced ends it at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from infra.proxy.client import NotServed, ProxyUnavailable
from rl.errors import DeadlineExceeded, Fenced, RollmillError
from rl.protocol import Phase, StepProtocol

PAUSE_S = 0.5

log = logging.getLogger(__name__)


class SwapTimeout(DeadlineExceeded):
    """The proxy did not take a new version before the deadline."""


class Control(Protocol):
    """What the trainer asks of the proxy (`infra.proxy.client.ControlClient`), under its own fence."""

    def suspend(self) -> None: ...

    def prefetch(self, version: int) -> None: ...

    def update(self, version: int, oldest_viable: int) -> None: ...

    def resume(self) -> None: ...


class Engines:
    """The trainer's side of the proxy."""

    def __init__(
        self,
        control: Control,
        deadline_s: float,
        start_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`start_s`: how much longer than `deadline_s` a swap waits in which the proxy was not there."""
        self._control, self._deadline_s, self._clock, self._pause = control, deadline_s, clock, pause
        self._start_s = start_s
        self._stopped = False

    def swap(self, protocol: StepProtocol, version: int, oldest_viable: int) -> None:
        """Take `protocol` from before SUSPEND through RECOMPUTE. Raises SwapTimeout, Fenced, or the proxy's
        named error."""
        begin, patience, waits = self._clock(), self._deadline_s, "deadlines.control"
        while True:
            try:
                self._once(protocol, version, oldest_viable)
                return
            except (ProxyUnavailable, NotServed, DeadlineExceeded) as error:
                if isinstance(error, ProxyUnavailable):
                    patience, waits = self._deadline_s + self._start_s, "deadlines.control + deadlines.start"
                if self._clock() - begin > patience:
                    raise SwapTimeout(
                        f"the proxy did not take version {version} within {patience:.0f} s ({waits}): {error}"
                    ) from error
                if self._stopped:
                    raise
                self._pause(PAUSE_S)

    def _once(self, protocol: StepProtocol, version: int, oldest_viable: int) -> None:
        protocol.enter(Phase.SUSPEND)
        try:
            self._control.suspend()
            protocol.enter(Phase.UPDATE)
            self._control.update(version, oldest_viable=oldest_viable)
            self._control.resume()
        except BaseException:
            with suppress(RollmillError):
                self._control.resume()
            protocol.abandon_update()
            raise
        protocol.enter(Phase.RESUME)
        protocol.enter(Phase.RECOMPUTE)

    def stop(self) -> None:
        """Try nothing again from now on: the trainer ends. From any thread."""
        self._stopped = True

    def prefetch(self, version: int) -> None:
        """Let the engines read a version while they go on. Only a hint: that it fails shows in the next swap."""
        try:
            self._control.prefetch(version)
        except Fenced:
            raise
        except RollmillError as error:
            log.warning("version %d was not prefetched: %s", version, error)
