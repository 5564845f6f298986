"""A job of a service while it is rolled out: what it may start, and what it used.

Invariant: nothing here decides; what is counted of a job's use only rises, and what was in flight at a kill is not
counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from flows.feeder import Feeder
from infra.proxy.client import ProxyUnavailable
from infra.store.errors import NotFound, StoreUnavailable
from infra.store.objects import ObjectStore
from rl.errors import RollmillError
from rl.jobs import Entry
from rl.trajectory import Uid

LINE_S = 10.0
"""A job that waits for its turn for so long is told to stand in line."""
USAGE_S = 2.0
"""Between two notes of what a job used."""


class BudgetSpent(RollmillError):
    """A job has generated what it was allowed to."""


class Usage:
    """What a job has generated: an object of its own, `usage.json`, noted now and then. Of what was in flight at a
    kill nothing is counted."""

    def __init__(self, store: ObjectStore, prefix: str):
        self._store, self._key = store, f"{prefix}usage.json"
        self.tokens = self.groups = 0
        with suppress(NotFound):
            told = json.loads(store.get(self._key))
            self.tokens, self.groups = int(told["tokens"]), int(told["groups"])
        self._noted, self._at = (self.tokens, self.groups), monotonic()

    def take(self, tokens: int, groups: int, at_once: bool = False) -> None:
        """So much more."""
        self.tokens += tokens
        self.groups += groups
        found = (self.tokens, self.groups)
        if found != self._noted and (at_once or monotonic() - self._at >= USAGE_S):
            self._store.put(self._key, json.dumps({"tokens": self.tokens, "groups": self.groups}).encode())
            self._noted, self._at = found, monotonic()


@dataclass
class Playing:
    """A job that is rolled out."""

    entry: Entry
    feeder: Feeder
    usage: Usage
    since: float = field(default_factory=monotonic)
    seen: tuple[int | None, int | None] = (None, None)
    looked: float = 0.0
    wanted: list[Uid] = field(default_factory=list)
    """What may start, as of the last look."""
    over: bool = False
    """Whether its last version is committed."""
    arrivals: int = 0
    """Times that a batch may have become complete."""
    troubled: float | None = None
    """Since when the proxy can not serve its adapter."""
    lined: float | None = None
    """Since when it would start something, has nothing in flight, and others go before it."""
    too_large: bool = False
    """Whether it was told that its groups have no room."""

    def stands_in_line(self, now: float) -> bool:
        """Whether it has waited for its turn for a while."""
        waits = bool(self.wanted) and not self.feeder.in_flight and not self.too_large
        self.lined = (self.lined or now) if waits else None
        return self.lined is not None and now - self.lined >= LINE_S

    @property
    def fed(self) -> bool:
        """Whether its trainer may have a batch now that something ended: under alpha 0 only once all has."""
        return not self.feeder.in_flight or not self.feeder.config.mode.alternates

    @property
    def complete(self) -> bool:
        """Whether the trainer has all that it needs."""
        return self.seen[0] is not None and not self.over and not self.wanted and not self.feeder.in_flight


class Alone:
    """What fails in the block ends one job, by `fail(reason)`; but not what is nobody's fault."""

    def __init__(self, fail: Callable[[str], None]):
        self._fail = fail

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception) or isinstance(error, StoreUnavailable | ProxyUnavailable):
            return False
        self._fail(f"{type(error).__name__}: {error}")
        return True
