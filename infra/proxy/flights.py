"""The generations in flight at one proxy, and what is remembered of their trajectories between turns.

Invariants
- What ends a generation early is the refusal that its caller gets; a caller that cancels it sees a cancellation.
- A request that comes again, as a client's retry does, replaces the first.
- A cancelled trajectory is refused from its next turn on. Its name may come again: a prompt that is no longer
  than the last one seen starts a new episode (a turn only ever appends), and is served.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from infra.proxy.refusals import Refused
from infra.proxy.wire import GenerateBody

REMEMBERED = 100_000
"""Trajectories, the most recent ones."""


@dataclass(slots=True, eq=False)
class Flight:
    """One request in flight."""

    body: GenerateBody
    task: asyncio.Task[Any]
    """The one that waits for it."""
    refusal: Refused | None = None

    def end(self, refusal: Refused) -> None:
        if self.refusal is None:
            self.refusal = refusal
            self.task.cancel()


@dataclass(slots=True)
class Memory:
    """What is remembered of a trajectory between its turns."""

    prompt_length: int = 0
    cancelled: bool = False


class Flights:
    """Lives on one event loop."""

    def __init__(self) -> None:
        self._flying: dict[str, Flight] = {}
        self._trajectories: OrderedDict[str, Memory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._flying)

    def admit(self, body: GenerateBody) -> None:
        """Remember a turn. Raises Refused when its trajectory was cancelled."""
        memory = self._trajectories.setdefault(body.trajectory, Memory())
        self._trajectories.move_to_end(body.trajectory)
        if len(self._trajectories) > REMEMBERED:
            self._trajectories.popitem(last=False)
        if memory.cancelled and len(body.token_ids) > memory.prompt_length:
            raise Refused("cancelled", f"trajectory {body.trajectory} was cancelled")
        memory.cancelled, memory.prompt_length = False, len(body.token_ids)

    @contextmanager
    def flying(self, body: GenerateBody) -> Iterator[None]:
        """While the present task generates it. Raises the Refused that ended it."""
        if (earlier := self._flying.get(body.request)) is not None:
            earlier.end(Refused("cancelled", f"request {body.request} was sent again"))
        task = asyncio.current_task()
        assert task is not None
        flight = self._flying[body.request] = Flight(body, task)
        try:
            yield
        except asyncio.CancelledError:
            if flight.refusal is None:
                raise
            task.uncancel()
            raise flight.refusal from None
        finally:
            if self._flying.get(body.request) is flight:
                del self._flying[body.request]

    def cancel(self, trajectory: str) -> int:
        """End what the trajectory has in flight and refuse its next turn; how many were in flight."""
        if (memory := self._trajectories.get(trajectory)) is not None:
            memory.cancelled = True
        flights = [f for f in self._flying.values() if f.body.trajectory == trajectory]
        for flight in flights:
            flight.end(Refused("cancelled", f"trajectory {trajectory} was cancelled"))
        return len(flights)

    def end(self, refusal: Callable[[GenerateBody], Refused | None]) -> None:
        """End those for which there is one."""
        for flight in list(self._flying.values()):
            if (found := refusal(flight.body)) is not None:
                flight.end(found)
