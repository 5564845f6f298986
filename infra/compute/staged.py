"""A group whose stages are watched one by one: for runs so small that one wants to see every stage.

    reset -> interact -> score    per member, each a future of its own
    admit                         once a complete group is scored

Invariants: as of `infra.compute.graphs`, whose retries, spares and deadline these are; each member is watched by one
thread at a time, in the order of its stages. A stage that fails starts its member again from reset, and is then
waited for in that try. It costs three times as many futures, and brings each stage's result here.
"""

from __future__ import annotations

from time import monotonic
from typing import Any

from dask.highlevelgraph import HighLevelGraph
from distributed import Future

from infra.compute.graphs import GroupGraph

STAGES = ("reset", "interact", "score")


class StagedGraph(GroupGraph):
    """Watch every stage of every member, then `close`."""

    _stages: dict[tuple[int, str], Future]
    """Of each member's newest try."""
    _chosen: list[int] | None = None

    def watch(self, member: int, stage: str) -> Any | None:
        """Wait until one stage of a member is done, in whichever try; what it gave, None where the group does without.
        Raises StageFailure."""
        self._first_try(member)
        retry = self._started[member][0] if member in self._started else 0
        while not (self._cancelled or self._complete or member in self._failed):
            future = self._stages[member, stage]
            try:
                result = future.result(timeout=max(0.0, self._end - monotonic()))
            except TimeoutError as error:
                self._client.cancel([future])
                raise self._late() from error
            except Exception:  # _after_failure raises what is not worth another try
                if self._complete:
                    return None  # it lost
                self._after_failure(future, member, retry)
                retry += 1
            else:
                if stage == STAGES[-1]:
                    self._note(self._done(member, self._stages[member, stage]))
                return result
        self._note(self._choose())
        return None

    def close(self) -> Any | None:
        """Admit the group, after every score was watched; None when it is not complete, because it was given up."""
        return None if self._chosen is None else self._admit(self._chosen)

    def _note(self, chosen: list[int] | None) -> None:
        if chosen is not None:
            self._chosen = chosen

    def _futures(self, graph: HighLevelGraph) -> list[Future]:
        keys = [key for stage in STAGES for key in graph.layers[stage]]
        futures = dict(zip(keys, self._client.get(graph, keys, sync=False), strict=True))
        if not hasattr(self, "_stages"):
            self._stages = {}
        self._stages |= {(int(stem.split("/")[-2]), stage): future for (stage, stem), future in futures.items()}
        return [future for (stage, _), future in futures.items() if stage == STAGES[-1]]
