"""For which jobs of a service something was sealed, told by its rollout to its trainers: `arrivals.json`.

    {"rollout": "1f2e...", "jobs": {"ann/walk": 12, ...}, "in_line": ["bob/walk"]}

How often, since this rollout began; and which jobs may not start anything now, for others go before them.
One object for all jobs, so that those who wait for their batches need not each ask the store.

Invariants: a hint, not a truth: it may be late, missing, or begin anew with another rollout, so whoever waits looks by
itself now and then; an object that is missing or unreadable tells of nothing.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping

from infra.store.errors import NotFound
from infra.store.objects import ObjectStore
from rl.config.run import service_prefix


class Arrivals:
    """Of one service, by its name."""

    def __init__(self, store: ObjectStore, service: str):
        self._store, self._key = store, f"{service_prefix(service)}arrivals.json"
        self._rollout = uuid.uuid4().hex
        self.in_line: frozenset[str] = frozenset()
        """As of the last look."""

    def tell(self, jobs: Mapping[str, int], in_line: Iterable[str] = ()) -> None:
        """Replace what was told before. Raises a StoreError."""
        told = {"rollout": self._rollout, "jobs": dict(jobs), "in_line": sorted(in_line)}
        self._store.put(self._key, json.dumps(told).encode())

    def look(self) -> dict[str, tuple[str, int]]:
        """By job what changes when something arrives. Raises a StoreError, but not for an absent object."""
        try:
            told = json.loads(self._store.get(self._key))
            self.in_line = frozenset(told.get("in_line", ()))
            return {id: (str(told["rollout"]), int(count)) for id, count in told["jobs"].items()}
        except (NotFound, ValueError, KeyError, AttributeError, TypeError):
            self.in_line = frozenset()
            return {}
