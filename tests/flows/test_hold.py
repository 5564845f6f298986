"""Who holds a run, by a real Prefect server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import hold
from flows.configure import load_config
from flows.flow_runs import run_tag
from flows.hold import RunHeld, held
from rl.config.run import RunConfig
from tests.command_line import Rollmill

pytestmark = pytest.mark.server


@pytest.fixture
def client(rollmill: Rollmill) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: os.environ["PREFECT_API_URL"]}), get_client(sync_client=True) as client:
        yield client


def config_of(name: str) -> RunConfig:
    return load_config("calculator", [f"name={name}"])


def slots(client: SyncPrefectClient, config: RunConfig) -> int:
    return client.read_global_concurrency_limit_by_name(run_tag(config)).active_slots


def train(config: RunConfig, body: Callable[[], None] = lambda: None) -> None:
    """As a flow run trains a run."""

    @flow(name="train", validate_parameters=False, persist_result=False)
    def hold_it() -> None:
        with held(config):
            body()

    hold_it()


def test_one_at_a_time_holds_a_run_and_gives_it_back(client: SyncPrefectClient) -> None:
    config = config_of("held")

    def another() -> None:
        assert slots(client, config) == 1
        with pytest.raises(RunHeld, match="is being trained by the flow run"):
            train(config)
        assert slots(client, config) == 1

    train(config, another)
    assert slots(client, config) == 0
    train(config)


def test_a_slot_whose_lease_the_server_forgot_is_freed(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart of the server, which keeps leases in its memory and slots in its database."""
    config, trained = config_of("forgotten"), []
    client.upsert_global_concurrency_limit_by_name(run_tag(config), 1)
    client.increment_concurrency_slots([run_tag(config)], 1, "concurrency").raise_for_status()
    monkeypatch.setattr(hold, "WAIT_S", 1.0)
    train(config, lambda: trained.append(slots(client, config)))
    assert trained == [1] and slots(client, config) == 0
