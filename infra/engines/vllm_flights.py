"""The generations in flight on one server, and how they are interrupted.

Invariant: `interrupt` returns when none of its flights has a request at the server any more, or the server was left
alone with it: one that does not end within `GRACE_S` is cut off with its connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from infra.engines.protocol import Generation
from infra.engines.vllm_flight import Flight
from infra.engines.vllm_http import ServerCalls
from infra.engines.vllm_wire import ABORT, abort

GRACE_S = 2.0
"""For the server to end a request that it was told to end."""


class Flights:
    """`prefix` makes the server's names of requests this object's own."""

    def __init__(self, calls: ServerCalls, prefix: str):
        self._calls, self._prefix, self._serial = calls, prefix, 0
        self._flying: set[Flight] = set()

    @contextmanager
    def flying(self, flight: Flight) -> Iterator[None]:
        self._flying.add(flight)
        try:
            yield
        finally:
            self._flying.discard(flight)

    def name(self, flight: Flight) -> str:
        """A new name for the flight's next request to the server."""
        self._serial += 1
        flight.wire_id = f"{self._prefix}-{self._serial}"
        return flight.wire_id

    def so_far(self, request_id: str) -> Generation | None:
        """What a request in flight has sampled until now; None for one that is not."""
        return next((flight.so_far() for flight in self._flying if flight.request_id == request_id), None)

    async def abort(self, chosen: Callable[[Flight], bool]) -> None:
        """End these for good, with what they have."""
        for flight in filter(chosen, self._flying):
            flight.aborted = True
        await self.interrupt(chosen)

    async def interrupt(self, chosen: Callable[[Flight], bool]) -> None:
        """Have the present requests of these flights end. Raises EngineClosed, DeadlineExceeded."""
        flights = list(filter(chosen, self._flying))
        names = [flight.wire_id for flight in flights if flight.wire_id is not None]
        ends = [flight.stop(0.0 if flight.wire_id is None else GRACE_S) for flight in flights]
        if names:
            await self._tell(names)
        if ends:
            await asyncio.wait(ends, timeout=2 * GRACE_S)

    def cut(self) -> None:
        """Stop all at once, without a word to the server."""
        for flight in list(self._flying):
            flight.stop(0.0)

    async def _tell(self, names: Sequence[str]) -> None:
        await self._calls.call("POST", ABORT, abort(names))
