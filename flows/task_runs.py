"""A living run's task runs on Prefect's server: only the newest stay.

Prefect's own retention takes flow runs that ended long ago, and their task runs with them; those of a flow run that
lives for weeks would only become more, by one for every group.

Invariants: what is deleted has ended, and is told by the store (`rollmill samples`); a server that does not answer
holds up nothing, and what was left is deleted the next time.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import TERMINAL_STATES
from prefect.client.schemas.sorting import TaskRunSort
from prefect.exceptions import ObjectNotFound

PAGE = 200
"""Task runs that are asked for at once: the most that the server answers."""

log = logging.getLogger(__name__)


class Newest:
    """Keeps the `kept` newest of the flow runs with this tag, beside whatever the process does."""

    def __init__(self, tag: str, kept: int) -> None:
        self._tag, self._kept = tag, kept
        self._running: threading.Thread | None = None

    def after(self, version: int) -> None:
        """A version was committed. Returns at once."""
        if self._running is not None and self._running.is_alive():
            return
        # a daemon: the end of the process need not wait for it
        self._running = threading.Thread(target=self._keep, name="task-runs", daemon=True)
        self._running.start()

    def _keep(self) -> None:
        try:
            with get_client(sync_client=True) as client:
                keep_newest(client, self._tag, self._kept)
        except httpx.HTTPError as error:
            log.info("old task runs stay for now: %s", error)


def keep_newest(client: SyncPrefectClient, tag: str, kept: int) -> int:
    """Delete the ended task runs of the flow runs with this tag, but the `kept` that ended last; how many that were.
    Raises httpx.HTTPError."""
    mine = filters.FlowRunFilter(tags=filters.FlowRunFilterTags(all_=[tag]))
    types = list(TERMINAL_STATES)
    ended = filters.TaskRunFilter(state=filters.TaskRunFilterState(type=filters.TaskRunFilterStateType(any_=types)))
    deleted = 0
    while found := client.read_task_runs(
        flow_run_filter=mine, task_run_filter=ended, sort=TaskRunSort.END_TIME_DESC, offset=kept, limit=PAGE
    ):
        for task_run in found:
            with suppress(ObjectNotFound):  # somebody else did
                client.delete_task_run(task_run.id)
                deleted += 1
    return deleted
