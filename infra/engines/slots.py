"""Which sequence lives in which slot of the key-value cache.

    slots   0 .. n-1            running rows, without holes: decoding reads a view, not a gather
            n .. slots-1        empty, or the kept prefix of a finished sequence

Invariants
- A row's `cached` first tokens are in its slot, computed under the row's present version.
- A kept prefix is reused only by the same tenant under the same version, and only where the new prompt extends
  all of it; `forget` drops it when its tenant's version changes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from infra.engines.kv import SlotCache
from infra.engines.protocol import Generation, Sampling


@dataclass(slots=True, eq=False)
class Row:
    """One request from submission to its result."""

    request_id: str
    tenant: str
    tokens: list[int]
    """Prompt and what was sampled so far."""
    prompt_length: int
    limit: int
    """Length at which the row is full."""
    stops: frozenset[int]
    sampling: Sampling
    seed: int
    future: Future[Generation]
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    cached: int = 0

    def so_far(self) -> Generation:
        """What it has, as a copy; from any thread, for a log-prob is the last thing that a token brings."""
        n = len(self.logprobs)
        tokens = self.tokens[self.prompt_length : self.prompt_length + n]
        return Generation(tokens, self.logprobs[:n], "abort", [span for span in self.spans if span[0] < n])

    def result(self, reason: str) -> Generation:
        return Generation(self.tokens[self.prompt_length :], self.logprobs, reason, self.spans)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Kept:
    """The cached prefix of a finished sequence."""

    tenant: str
    tokens: list[int]
    used: int
    """When it was last in use, counted in rows that left."""


class Slots:
    """The table. `budget` bounds the cache in bytes: when sequences grow long there are fewer slots."""

    def __init__(self, cache: SlotCache, max_batch: int, keep: bool, budget: int):
        self.cache = cache
        self.running: list[Row] = []
        self._kept: dict[int, Kept] = {}
        self._max_batch, self._keep, self._budget = max_batch, keep, budget
        self._clock = 0

    @property
    def kept(self) -> int:
        return len(self._kept)

    @property
    def longest(self) -> int:
        """The most positions that one sequence can have under the budget."""
        return self._budget // self.cache.position_bytes

    def has_room(self) -> bool:
        return len(self.running) < min(self._max_batch, self.cache.slots)

    def join(self, row: Row) -> int:
        """Give the row a slot; the number of its tokens that are cached there already."""
        n = len(self.running)
        source = self._best_prefix(row)
        if source is None:
            free = (s for s in range(n, self.cache.slots) if s not in self._kept)
            source = next(free, None)
            if source is None:
                source = min(self._kept, key=lambda slot: self._kept[slot].used)
                del self._kept[source]
            self._vacate(n, source)
            row.cached = 0
        else:
            row.cached = len(self._kept.pop(source).tokens)
            if source != n:
                displaced = self._kept.pop(n, None)
                self.cache.swap(source, n, max(row.cached, len(displaced.tokens) if displaced else 0))
                if displaced:
                    self._kept[source] = displaced
        self.running.append(row)
        return row.cached

    def leave(self, row: Row, forget: bool = False) -> None:
        """Take the row out of the batch, keeping what its slot holds for a later turn."""
        at, last = self.running.index(row), len(self.running) - 1
        if at != last:
            mover = self.running[last]
            self.cache.swap(at, last, max(row.cached, mover.cached))
            self.running[at] = mover
        self.running.pop()
        if self._keep and row.cached and not forget:
            self._clock += 1
            self._kept[last] = Kept(row.tenant, row.tokens[: row.cached], self._clock)
        row.cached = 0

    def forget(self, concerns: Callable[[str], bool]) -> None:
        """A version changed: nothing cached for the tenants concerned is valid any more."""
        self._kept = {slot: kept for slot, kept in self._kept.items() if not concerns(kept.tenant)}
        for row in self.running:
            if concerns(row.tenant):
                row.cached = 0

    def reserve(self, positions: int) -> list[Row]:
        """Make room for sequences of this length. Under the budget this may leave fewer slots: the rows that are
        returned, the youngest, lost theirs and have to wait."""
        if positions <= self.cache.capacity:
            return []
        capacity = min(self.cache.grown(positions), self.longest)
        slots = max(1, min(self.cache.slots, self._budget // (capacity * self.cache.position_bytes)))
        preempted = []
        while len(self.running) > slots:
            row = self.running.pop()
            row.cached = 0
            preempted.append(row)
        self._kept = {slot: kept for slot, kept in self._kept.items() if slot < slots}
        self.cache.grow(capacity, slots)
        return preempted

    def _vacate(self, slot: int, target: int) -> None:
        """Move what is kept in `slot` to the empty slot `target`."""
        if slot == target:
            return
        kept = self._kept.pop(slot, None)
        if kept is not None:
            self.cache.move(slot, target, len(kept.tokens))
            self._kept[target] = kept

    def _best_prefix(self, row: Row) -> int | None:
        best, length = None, 0
        for slot, kept in self._kept.items():
            n = len(kept.tokens)
            # one token at least must be computed anew, to have logits to sample from
            if length < n < len(row.tokens) and kept.tenant == row.tenant and row.tokens[:n] == kept.tokens:
                best, length = slot, n
        return best
