"""Requests that wait for an engine, in order of arrival, and the engines that are held for some of them.

A request that fits nowhere lets younger ones go first, or engines would idle; but what is large fits only where much
has ended, and small ones take each piece of that as it comes. So an engine is held for a request that was overtaken too
often: it takes nothing else until the request fits. One held engine for a whole fleet would do for one large request;
many of them, on many engines, would wait for one another: each gets its own, up to a share of the engines.

Invariants
- An engine is held for one waiting request, and a request holds one engine at most.
- `overtaken` counts the younger requests that are gone, however they went.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator
from dataclasses import dataclass

from rl.placement import HardwareClass


@dataclass(frozen=True, slots=True)
class Request:
    """One turn. Numbers are tokens."""

    id: str
    tenant: str
    trajectory: str
    domain: str
    prompt: int
    max_new: int
    may_split: bool = True
    runs_on: HardwareClass | None = None
    """Class that its owner declared, whatever is declared for the domain."""


class Waiting:
    """The queue."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, tuple[int, Request]] = OrderedDict()
        self._arrived = 0
        self._engine: dict[str, str] = {}
        """Held engines by request."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: str) -> bool:
        return request in self._requests

    def __iter__(self) -> Iterator[tuple[Request, int]]:
        """Requests, oldest first, and how often each was overtaken; requests may be removed on the way."""
        behind = len(self._requests)
        for number, request in list(self._requests.values()):
            behind -= 1
            yield request, self._arrived - number - behind

    def add(self, request: Request) -> None:
        self._arrived += 1
        self._requests[request.id] = self._arrived, request

    def remove(self, request: str) -> None:
        """It goes, and holds nothing any more."""
        del self._requests[request]
        self._engine.pop(request, None)

    def hold(self, request: str, engine: str) -> None:
        self._engine[request] = engine

    def held(self, request: str) -> str | None:
        """The engine that is held for a request."""
        return self._engine.get(request)

    @property
    def engines(self) -> set[str]:
        """All that are held."""
        return set(self._engine.values())

    def keep(self, engines: Container[str]) -> None:
        """Hold none but these."""
        self._engine = {request: engine for request, engine in self._engine.items() if engine in engines}
