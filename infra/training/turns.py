"""The one update queue: tenants' threads ask for a turn, the optimizer's thread serves them one after another.

    tenant's thread    ask ............................ result | LetGo
    optimizer's        errands -> take (`rl.fairness`) -> work -> served

Invariants
- All work is done on the thread that calls `serve`, one at a time.
- What a tenant's work raises is raised in the tenant's thread, and nowhere else; unless it says that the device is lost
  for everybody, which ends `serve` too.
- Whoever asked gets an answer: a result, what its work raised, or LetGo.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from infra.training.blame import Blame
from rl.fairness import TenantQueue, TenantShare

T = TypeVar("T")


class LetGo(Exception):
    """This trainer no longer trains the job: it was paused, cancelled, or given to another one."""


class Turns:
    """See the module. `entitle` names the tenants; `blame` is told whose turn it is."""

    def __init__(self, slack: float, patience: int, blame: Blame, clock: Callable[[], float] = time.monotonic) -> None:
        """`slack` and `patience` as in `TenantQueue`."""
        self._queue, self._blame, self._clock = TenantQueue({}, slack, patience), blame, clock
        self._asked: dict[str, tuple[Callable[[], Any], Future[Any]]] = {}
        self._errands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.busy_s = 0.0
        """Spent on turns."""

    @property
    def waiting(self) -> frozenset[str]:
        with self._changed:
            return frozenset(self._asked)

    def entitle(self, shares: Mapping[str, TenantShare]) -> None:
        """From now on these are all the tenants."""
        with self._changed:
            for tenant in self._asked.keys() - shares.keys():
                self._withdraw(tenant)
            self._queue.entitle(shares)

    def ask(self, tenant: str, work: Callable[[], T]) -> Future[T]:
        """Have `work` done when it is the tenant's turn. One at a time for each tenant."""
        answer: Future[T] = Future()
        with self._changed:
            if self._closed:
                answer.set_exception(LetGo())
                return answer
            self._queue.offer(tenant)
            self._asked[tenant] = work, answer
            self._changed.notify()
        return answer

    def withdraw(self, tenant: str) -> None:
        """What it asked for and was not begun is not done."""
        with self._changed:
            self._withdraw(tenant)

    def _withdraw(self, tenant: str) -> None:
        self._queue.withdraw(tenant)
        if (asked := self._asked.pop(tenant, None)) is not None:
            asked[1].set_exception(LetGo())

    def errand(self, work: Callable[[], None]) -> None:
        """Something short for the optimizer's thread, before the next turn. It must not raise."""
        with self._changed:
            self._errands.append(work)
            self._changed.notify()

    def serve(self, patience_s: float) -> str | None:
        """Whose turn it was; None when nobody asked for `patience_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._asked or self._errands, patience_s)
            errands = [self._errands.popleft() for _ in range(len(self._errands))]
            tenant = self._queue.take()
            asked = None if tenant is None else self._asked.pop(tenant)
        for errand in errands:
            errand()
        if tenant is None or asked is None:
            return None
        self._do(tenant, *asked)
        return tenant

    def _do(self, tenant: str, work: Callable[[], Any], answer: Future[Any]) -> None:
        begin = self._clock()
        self._blame.begin(tenant)
        try:
            result = work()
        except BaseException as error:
            answer.set_exception(error if isinstance(error, Exception) else LetGo())
            if isinstance(error, torch.AcceleratorError):
                raise  # nothing can be computed in this process any more, and the blame stays
            self._blame.end(tenant)
            if not isinstance(error, Exception):
                raise
        else:
            self._blame.end(tenant)
            answer.set_result(result)
        finally:
            seconds = self._clock() - begin
            with self._changed:
                self.busy_s += seconds
                self._queue.served(tenant, seconds)

    def close(self) -> None:
        """Serve nobody any more; whoever waits is let go."""
        with self._changed:
            self._closed = True
            for tenant in list(self._asked):
                self._withdraw(tenant)
