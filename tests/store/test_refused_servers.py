"""A server that ignores create-if-absent is refused before a run writes anything to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flows import prepare
from flows.configure import load_config
from infra.store.errors import StoreNotAtomic
from infra.store.objects import ObjectStore
from rl.config.run import RunConfig
from tests.store import servers
from tests.store.conftest import CREDENTIALS

pytestmark = pytest.mark.server

KEYS = ("rclone", "rclone-secret")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with servers.rclone(tmp_path_factory.mktemp("rclone"), *KEYS) as url:
        yield url


@pytest.fixture
def config(address: str, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    for name, value in zip(CREDENTIALS, KEYS, strict=True):
        monkeypatch.setenv(name, value)
    return load_config("frozen_lake", [f"store.endpoint_url={address}"])


def test_rclones_server_lets_two_writers_win(config: RunConfig) -> None:
    store = prepare.reach(config, create=True)
    assert store.create("k", b"mine", "n1") and store.create("k", b"theirs", "n2"), "what makes it unfit"


def test_a_run_on_rclones_server_is_refused_with_the_reason(config: RunConfig) -> None:
    with pytest.raises(StoreNotAtomic, match=r"ignores create-if-absent \(If-None-Match: \*\); use another") as refused:
        prepare.open_run(config, resume=False)
    assert "\n" not in str(refused.value) and str(config.store.endpoint_url) in str(refused.value)
    written = [key.removeprefix(config.prefix) for key in ObjectStore.connect(config.store).keys(config.prefix)]
    assert all(key.startswith("probe/") for key in written), "nothing of the run itself"
