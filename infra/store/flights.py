"""What the rollout side has in flight, told to the training side through the store: `flights.json`.

    {"12.0": 3, ...}      attempt -> version under which it started

A hint, not a truth: it may name what is settled or sealed meanwhile, or what died with its rollout process, until the
next one tells anew. Readers take from it only for what to wait, and every such wait has its deadline.

Invariants: a group is told before it is started; an object that is missing or unreadable says that nothing flies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from infra.store.errors import NotFound
from infra.store.objects import ObjectStore
from rl.trajectory import Uid


class Flights:
    """One run's. `prefix` is the run's, with a closing slash."""

    def __init__(self, store: ObjectStore, prefix: str):
        self._store, self._key = store, f"{prefix}flights.json"

    def tell(self, flights: Mapping[Uid, int]) -> None:
        """Replace what was told before. Raises a StoreError."""
        self._store.put(self._key, json.dumps({str(uid): version for uid, version in flights.items()}).encode())

    def look(self) -> dict[Uid, int]:
        """What was told last. Raises a StoreError, but not for an absent object."""
        try:
            told = json.loads(self._store.get(self._key))
            return {Uid.parse(uid): int(version) for uid, version in told.items()}
        except (NotFound, ValueError, AttributeError, TypeError):
            return {}
