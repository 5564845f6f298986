"""Of a living run only its newest task runs stay on Prefect's server."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic, sleep

import pytest
from prefect import flow, tags, task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.task_runs import keep_newest
from tests.command_line import Rollmill

pytestmark = pytest.mark.server


@task(task_run_name="{name}", persist_result=False)
def unit(name: str, within: Callable[[], None] | None = None) -> None:
    if within is not None:
        within()


def left(client: SyncPrefectClient, tag: str) -> dict[str, str]:
    """Names of the task runs of flow runs with this tag, and the state of each."""
    mine = filters.FlowRunFilter(tags=filters.FlowRunFilterTags(all_=[tag]))
    return {r.name: str(r.state_type) for r in client.read_task_runs(flow_run_filter=mine)}


def recorded(client: SyncPrefectClient, tag: str, count: int) -> None:
    """Prefect records task runs beside the work: wait until so many ended."""
    end = monotonic() + 60
    while sum("COMPLETED" in state for state in left(client, tag).values()) < count:
        assert monotonic() < end, left(client, tag)
        sleep(0.2)


def test_the_newest_stay_and_what_runs_and_what_is_of_another_run(rollmill: Rollmill) -> None:
    with temporary_settings({PREFECT_API_URL: os.environ["PREFECT_API_URL"]}), get_client(sync_client=True) as client:

        @flow(persist_result=False)
        def run(within: Callable[[], None] | None) -> None:
            for at in range(5):
                unit(f"group {at}")
            unit("in flight", within)

        def tidy() -> None:
            recorded(client, "run:kept", 5)
            assert keep_newest(client, "run:kept", 2) == 3

        with tags("run:other"):
            run(None)
        with tags("run:kept"):
            run(tidy)
        recorded(client, "run:other", 6)
        recorded(client, "run:kept", 3)
        assert set(left(client, "run:kept")) == {"group 3", "group 4", "in flight"}
        assert len(left(client, "run:other")) == 6
        assert keep_newest(client, "run:kept", 3) == 0
