"""The trainers of a service, long tasks on workers of the class compute_gpu.

Invariants: one that died is started again under its number within `restarts.trainer`, and goes on with its jobs from
the store; past that budget, or after a named failure, its jobs go to the others, and with the last one the service
ends, by name.
"""

from __future__ import annotations

import uuid

from distributed import Future

from flows.session import Session
from rl.config.tenants import ServiceConfig
from rl.errors import RollmillError
from rl.placement import placement_of
from tasks.child import Crashed
from tasks.step import train_tenants


class Trainers:
    """Of one service; all are started. Each tells its status in the store as soon as it works."""

    def __init__(self, session: Session, service: ServiceConfig):
        self._session, self._service = session, service
        self._left = dict.fromkeys(range(service.trainers), service.restarts.trainer)
        self._running: dict[int, Future] = {}
        for number in range(service.trainers):
            self._start(number)

    @property
    def up(self) -> bool:
        """Whether each that there is has its base in memory and looks for jobs. Raises a StoreError."""
        return all(self._session.log.store.exists(self._status(number)) for number in self._running)

    @property
    def alive(self) -> frozenset[int]:
        """The numbers of those that there are, or will be again."""
        return frozenset(self._running)

    def check(self) -> None:
        """Start again what may be. Raises what ended the last one."""
        for number, task in list(self._running.items()):
            if not task.done():
                continue
            cause = task.exception() or RollmillError("it ended before the service did")
            del self._running[number]
            if isinstance(cause, Crashed) and self._left[number] > 0:
                self._left[number] -= 1
                self._say(f"trainer {number} died ({cause}): started again, {self._left[number]} restarts left")
                self._start(number)
            elif not self._running:
                raise RollmillError(f"trainer {number}: {cause}")
            else:
                self._say(f"trainer {number} is given up ({cause}); its jobs go to the others")

    def _start(self, number: int) -> None:
        session = self._session
        session.log.store.delete([self._status(number)])  # which is that of the process before
        self._running[number] = session.client.submit(
            train_tenants,
            session.key,
            str(session.service_file),
            number,
            session.proxy_url,
            session.keys.control,
            resources={placement_of(train_tenants).preferred().value: 1},
            pure=False,
            retries=0,
            key=f"trainer-{number}-{uuid.uuid4().hex[:8]}",
        )
        session.tasks.append(self._running[number])

    def _status(self, number: int) -> str:
        return f"{self._service.prefix}trainers/{number}.json"

    def _say(self, text: str) -> None:
        self._session.console.print(text, highlight=False)
