"""LoRA adapters of many tenants on one base, mixed in one batch.

The adapters of a layer lie in one tensor, and the rows of a batch are put in chunks of one adapter each, so that all
of them take two batched products, however many there are:

    x (rows) --take--> chunks of rows --bmm A--> --bmm B--> --back--> added to base(x)

A chunk has room for the most rows that one adapter has, so that each has one chunk, or, where that would more than
double the rows that are multiplied, for an even share: then an adapter with more rows has several chunks. Chunks are
padded with rows whose products nobody takes back. Layers with one input (the queries, keys and values of a block) share
what is taken of it. One adapter alone takes plain products.

Invariants
- The base's tensors are never written: no adapter is merged.
- A tenant has one adapter at a time. A new one takes its place whole, or not at all.
- A row without an adapter gets exactly the base's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from infra.engines.fitting import Adapter


@dataclass(slots=True)
class Stack:
    """The adapters of one layer by place, padded to one rank with zeros (which add nothing)."""

    a: torch.Tensor
    """(places, in, rank)"""
    b: torch.Tensor
    """(places, rank, out)"""

    def grow(self, places: int, rank: int) -> None:
        if places > self.a.shape[0] or rank > self.a.shape[2]:
            rank = max(rank, self.a.shape[2])
            a = self.a.new_zeros(places, self.a.shape[1], rank)
            b = self.b.new_zeros(places, rank, self.b.shape[2])
            a[: self.a.shape[0], :, : self.a.shape[2]] = self.a
            b[: self.b.shape[0], : self.b.shape[1]] = self.b
            self.a, self.b = a, b


@dataclass(slots=True)
class Route:
    """Which rows of a batch get which adapter."""

    single: int | None
    """The place of the adapter that all rows have."""
    places: torch.Tensor | None = None
    """(chunks,) the adapter of each; None where they are all that there are, in order."""
    chunks: int = 0
    take: torch.Tensor | None = None
    """(chunks x size,) row of the batch in each place of the chunks."""
    kept: torch.Tensor | None = None
    """Those places that are no padding, in the order of `rows`; None where there is none."""
    rows: torch.Tensor | None = None
    """Where each of them belongs in the batch; None where that is the whole batch in order."""
    _taken: tuple[torch.Tensor, torch.Tensor] | None = None

    def taken(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(chunks, size x queries, in) of an input, taken once for all layers that have it in a row."""
        if self._taken is None or self._taken[0] is not x:
            self._taken = x, x.index_select(0, self.take).view(self.chunks, -1, x.shape[2]).to(dtype)
        return self._taken[1]


class AdapterBank:
    """The adapters on one module. Used by the engine's loop thread only."""

    def __init__(self, module: torch.nn.Module):
        self._module = module
        self._stacks: dict[str, Stack] = {}
        self._place: dict[str, int] = {}
        self._free: list[int] = []
        """Places below the highest one in use that nobody has."""
        self._routed: tuple[int | None, ...] = ()
        self.current: Route | None = None

    @property
    def tenants(self) -> list[str]:
        """Those that have an adapter."""
        return list(self._place)

    def put(self, tenant: str, adapter: Adapter) -> None:
        """Make this, which fits the model, the tenant's adapter."""
        if tenant not in self._place:
            self._place[tenant] = self._free.pop() if self._free else len(self._place)
        place = self._place[tenant]
        for path in adapter.keys() - self._stacks.keys():
            shapes = adapter[path]
            self._stacks[path] = Stack(shapes.a.new_zeros(0, *shapes.a.shape), shapes.b.new_zeros(0, *shapes.b.shape))
            layer = self._module.get_submodule(path)
            layer.forward = partial(_forward, layer.forward, self._stacks[path], self)
        for path, stack in self._stacks.items():
            low = adapter.get(path)
            stack.grow(self._places, 0 if low is None else low.a.shape[1])
            stack.a[place].zero_()
            stack.b[place].zero_()  # whoever had the place before may have left what is not finite
            if low is not None:
                rank = low.a.shape[1]
                stack.a[place, :, :rank] = low.a
                stack.b[place, :rank] = low.b
        self._routed = ()

    def remove(self, tenant: str) -> None:
        """The tenant has no adapter any more; its place is for the next one."""
        if (place := self._place.pop(tenant, None)) is not None:
            self._free.append(place)
            self._routed, self.current = (), None

    @property
    def _places(self) -> int:
        return len(self._place) + len(self._free)

    def route(self, tenants: Sequence[str]) -> None:
        """Set the adapter of each row of the next forwards; a tenant without one has the base."""
        if self._place:
            wanted = tuple(self._place.get(tenant) for tenant in tenants)
            if wanted != self._routed:
                self._routed, self.current = wanted, self._plan(wanted)

    def _plan(self, wanted: tuple[int | None, ...]) -> Route | None:
        members: dict[int, list[int]] = {}
        for row, place in enumerate(wanted):
            if place is not None:
                members.setdefault(place, []).append(row)
        if not members:
            return None
        if len(members) == 1 and None not in wanted:
            return Route(single=wanted[0])
        total, size = sum(map(len, members.values())), max(map(len, members.values()))
        if size * len(members) > 2 * total:
            size = -(-total // len(members))
        chunks = [
            (place, rows[at : at + size])
            for place, rows in sorted(members.items())
            for at in range(0, len(rows), size)
        ]
        places = [place for place, _ in chunks]
        take = [row for _, rows in chunks for row in rows + rows[:1] * (size - len(rows))]
        kept, rows = None, take
        if len(take) > total:  # then in the order of the batch, which may be all of it
            filled = sorted((row, at * size + i) for at, (_, rows) in enumerate(chunks) for i, row in enumerate(rows))
            kept, rows = [at for _, at in filled], [row for row, _ in filled]
        device = next(iter(self._stacks.values())).a.device
        return Route(
            single=None,
            places=None if places == list(range(self._places)) else torch.tensor(places, device=device),
            chunks=len(chunks),
            take=torch.tensor(take, device=device),
            kept=None if kept is None else torch.tensor(kept, device=device),
            rows=None if rows == list(range(len(wanted))) else torch.tensor(rows, device=device),
        )


def _forward(base: Any, stack: Stack, bank: AdapterBank, x: torch.Tensor) -> torch.Tensor:
    """`base(x)` and for each row the product with its adapter; x is (rows, queries, in)."""
    result = base(x)
    route = bank.current
    if route is None:
        return result
    a, b = stack.a, stack.b
    if route.single is not None:
        low, up = torch.mm(x.flatten(0, 1).to(a.dtype), a[route.single]), b[route.single]
        if result.dtype == up.dtype:
            result.flatten(0, 1).addmm_(low, up)
            return result
        return result.add_(torch.mm(low, up).view(result.shape))
    if route.places is not None:
        a, b = a.index_select(0, route.places), b.index_select(0, route.places)
    delta = torch.bmm(torch.bmm(route.taken(x, a.dtype), a), b).view(-1, *result.shape[1:])
    if route.kept is not None:
        delta = delta.index_select(0, route.kept)
    if delta.dtype != result.dtype:
        delta = delta.to(result.dtype)
    return result.add_(delta) if route.rows is None else result.index_add_(0, route.rows, delta)
