"""Of a share of the problems, one trajectory as a trace in MLflow.

Invariant: never in the way: a store or a server that does not answer costs the trace.
"""

from __future__ import annotations

from contextlib import suppress

from infra.store import schema
from infra.store.errors import StoreError
from infra.store.objects import ObjectStore
from infra.tracking.run import Tracker
from infra.tracking.traces import of_several_turns, sampled
from rl.config.run import RunConfig
from rl.trajectory import Problem
from tasks.admit import Sealed


class Tracing:
    """Of one rollout process. Close it."""

    def __init__(self, config: RunConfig, store: ObjectStore) -> None:
        self._config, self._store = config, store
        self._tracker: Tracker | None = None

    def note(self, problem: Problem, sealed: Sealed) -> None:
        """A group that was sealed."""
        if sealed.turns <= 1 or not sampled(problem, self._config.tracking.traces):
            return
        if self._tracker is None:
            self._tracker = Tracker.start(self._config, "rollout")
        with suppress(StoreError):
            for group in schema.decode(self._store.get(f"{self._config.prefix}{sealed.segment}")):
                if (member := of_several_turns(group)) is not None:
                    self._tracker.log_trace(member)

    def close(self, deadline_s: float) -> None:
        """Send what waits. It may go on afterwards."""
        if self._tracker is not None:
            self._tracker.close(deadline_s)
            self._tracker = None
