"""The store's contract suite runs against three independent servers: SeaweedFS (the embedded default), moto and
ministack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest

from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection
from tests.store import servers

CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


class Tap:
    """A boto3 client that is listened to, and that fails when told: `before` an operation is sent, or `after`
    the server has done it, so that only the answer is lost."""

    def __init__(self, client: Any):
        self._client = client
        self.calls: list[tuple[str, str]] = []
        self.before: dict[str, list[Exception | Callable[[], None]]] = {}
        self.after: dict[str, list[Exception]] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, kwargs.get("Key", kwargs.get("StartAfter", ""))))
            if self.before.get(name):
                action = self.before[name].pop(0)
                if isinstance(action, Exception):
                    raise action
                action()
            answer = found(*args, **kwargs)
            if self.after.get(name):
                raise self.after[name].pop(0)
            return answer

        return call

    def count(self, operation: str, containing: str = "") -> int:
        return sum(name == operation and containing in key for name, key in self.calls)


@pytest.fixture(scope="session")
def ministack_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with servers.ministack(tmp_path_factory.mktemp("ministack")) as url:
        yield url


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.server) for name in ("weed", "ministack")] + ["moto"])
def section(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StoreSection:
    """The configuration of a server with an existing bucket; its credentials are in the environment."""
    if request.param == "weed":
        s3 = request.getfixturevalue("s3")
        endpoint, keys = s3.endpoint_url, (s3.access_key, s3.secret_key)
    else:
        endpoint, keys = request.getfixturevalue(f"{request.param}_url"), ("testing", "testing")
    for name, value in zip(CREDENTIALS, keys, strict=True):
        monkeypatch.setenv(name, value)
    made = StoreSection(endpoint_url=endpoint)
    ObjectStore.connect(made).ensure_bucket()
    return made


@pytest.fixture
def store(section: StoreSection) -> ObjectStore:
    return ObjectStore.connect(section)


@pytest.fixture
def tap(store: ObjectStore) -> Tap:
    return Tap(store.client)


@pytest.fixture
def tapped(store: ObjectStore, tap: Tap) -> ObjectStore:
    """The same store, through the tap."""
    return ObjectStore(tap, store.bucket)


@pytest.fixture
def prefix(request: pytest.FixtureRequest, store: ObjectStore) -> str:
    """A run's prefix of the test's own."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    return f"test/{name}/"


@pytest.fixture
def foreign_client(section: StoreSection) -> Any:
    """A plain boto3 client, as another program would use it."""
    return boto3.client("s3", endpoint_url=section.endpoint_url, region_name=section.region)
