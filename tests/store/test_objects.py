"""The object layer: create-if-absent under lost answers and rivals, repetition, named errors."""

from __future__ import annotations

import logging
import pickle
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, IncompleteReadError, ReadTimeoutError

from infra.store import clients, objects
from infra.store.errors import (
    BucketMissing,
    NotFound,
    StoreDenied,
    StoreNotAtomic,
    StoreUnavailable,
)
from infra.store.objects import ObjectStore, probe_atomicity
from rl.config.infrastructure import StoreSection
from tests.store.conftest import Tap

LOST = ReadTimeoutError(endpoint_url="http://store")


def answer(status: int, code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Op")


def test_objects_are_kept_listed_in_order_and_deleted(store: ObjectStore, prefix: str) -> None:
    for name in ("b/2", "a/1", "b/1"):
        store.put(prefix + name, name.encode())
    assert store.get(prefix + "b/2") == b"b/2"
    assert store.exists(prefix + "b/2") and not store.exists(prefix + "b")
    assert store.get_range(prefix + "b/2", 1, 2) == b"/2"
    assert list(store.keys(prefix)) == [prefix + n for n in ("a/1", "b/1", "b/2")]
    assert list(store.keys(prefix, start_after=prefix + "b/")) == [prefix + n for n in ("b/1", "b/2")]
    store.delete([prefix + "b/1", prefix + "never-there"])
    with pytest.raises(NotFound, match="b/1"):
        store.get(prefix + "b/1")


@pytest.mark.slow
def test_listing_goes_past_one_page(store: ObjectStore, prefix: str) -> None:
    names = [f"{prefix}{n:04d}" for n in range(1003)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b""), names))
    assert list(store.keys(prefix)) == names
    store.delete(names)
    assert list(store.keys(prefix)) == []


def test_create_is_won_once(store: ObjectStore, prefix: str) -> None:
    assert store.create(prefix + "k", b"mine", "n1")
    assert not store.create(prefix + "k", b"theirs", "n2")
    assert store.create(prefix + "k", b"mine", "n1"), "a repeated request recognises its own success"
    assert store.get(prefix + "k") == b"mine"


def test_racing_creates_have_one_winner(store: ObjectStore, prefix: str) -> None:
    for race in range(2):
        key = f"{prefix}race-{race}"
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda n, key=key: store.create(key, b"%d" % n, f"nonce-{n}"), range(8)))
        assert won.count(True) == 1
        assert store.get(key) == b"%d" % won.index(True)


@pytest.mark.parametrize("fault", [LOST, answer(500, "InternalError"), answer(409, "ConditionalRequestConflict")])
def test_a_lost_acknowledgement_is_still_ours(tapped: ObjectStore, tap: Tap, prefix: str, fault: Exception) -> None:
    tap.after["put_object"] = [fault]
    assert tapped.create(prefix + "k", b"mine", "n1")
    assert tap.count("put_object") == 2 and tap.count("head_object") == 1


def test_a_rival_who_came_during_the_repetition_wins(
    tapped: ObjectStore, tap: Tap, store: ObjectStore, prefix: str
) -> None:
    tap.before["put_object"] = [LOST, lambda: store.put(prefix + "k", b"theirs")]
    assert not tapped.create(prefix + "k", b"mine", "n1")
    assert store.get(prefix + "k") == b"theirs"


def test_a_winner_that_can_not_be_looked_at_yet_is_asked_again(
    tapped: ObjectStore, tap: Tap, store: ObjectStore, prefix: str
) -> None:
    store.create(prefix + "k", b"theirs", "n2")
    tap.before["head_object"] = [answer(404, "404"), answer(500, "InternalError")]
    assert not tapped.create(prefix + "k", b"mine", "n1")


@pytest.mark.parametrize(
    "fault",
    [
        answer(500, "InternalError"),
        answer(503, "SlowDown"),
        IncompleteReadError(actual_bytes=1, expected_bytes=2),
        EndpointConnectionError(endpoint_url="http://store"),
    ],
)
def test_what_passes_is_repeated(tapped: ObjectStore, tap: Tap, prefix: str, fault: Exception) -> None:
    tapped.put(prefix + "k", b"v")
    tap.before["get_object"] = [fault, fault]
    assert tapped.get(prefix + "k") == b"v"


def test_repetition_ends_at_the_deadline_by_name(tap: Tap, store: ObjectStore, prefix: str) -> None:
    hurried = ObjectStore(tap, store.bucket, deadline_s=0.3)
    tap.before["get_object"] = [answer(500, "InternalError")] * 100
    with pytest.raises(StoreUnavailable, match="did not succeed within"):
        hurried.get(prefix + "k")


def test_a_log_record_can_not_be_deleted(store: ObjectStore) -> None:
    with pytest.raises(ValueError, match="never deleted"):
        store.delete(["tenant/run/log/0000000007.json"])


MIB = 1 << 20


def test_an_object_goes_in_parts_and_appears_whole(tapped: ObjectStore, tap: Tap, prefix: str) -> None:
    body = bytes(range(256)) * (5 * MIB // 256)
    tap.before["upload_part"] = [ReadTimeoutError(endpoint_url="http://store")]
    tap.after["complete_multipart_upload"] = [ReadTimeoutError(endpoint_url="http://store")]
    upload = tapped.upload(prefix + "big", 5 * MIB)
    upload.send(5 * MIB, b"tail")
    upload.send(0, body)
    assert not tapped.exists(prefix + "big")
    upload.finish()
    assert tapped.get(prefix + "big") == body + b"tail"
    assert tapped.get_range(prefix + "big", 5 * MIB, 100) == b"tail"
    assert tapped.get_range(prefix + "big", 6 * MIB, 100) == b""


def test_an_abandoned_upload_leaves_nothing(store: ObjectStore, prefix: str) -> None:
    upload = store.upload(prefix + "big", 5 * MIB)
    upload.send(0, b"x")
    upload.abandon()
    assert not store.exists(prefix + "big")


def test_probe_accepts_an_atomic_store(store: ObjectStore, prefix: str) -> None:
    probe_atomicity(store.client, store.bucket, prefix)
    assert list(store.keys(prefix)) == []


class Unconditional:
    """A client whose server does not know `If-None-Match`."""

    def __init__(self, client: Any):
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def put_object(self, **kwargs: Any) -> Any:
        kwargs.pop("IfNoneMatch", None)
        return self._client.put_object(**kwargs)


def test_probe_refuses_a_store_that_ignores_the_condition(store: ObjectStore, prefix: str) -> None:
    with pytest.raises(StoreNotAtomic, match="ignores create-if-absent"):
        probe_atomicity(Unconditional(store.client), store.bucket, prefix)


def test_probe_refuses_a_store_that_lacks_the_condition(tap: Tap, store: ObjectStore, prefix: str) -> None:
    tap.before["put_object"] = [answer(501, "NotImplemented") for _ in range(8)]
    with pytest.raises(StoreNotAtomic, match="refuses create-if-absent"):
        probe_atomicity(tap, store.bucket, prefix)


def test_a_missing_bucket_is_made_on_an_explicit_endpoint(tap: Tap) -> None:
    store = ObjectStore(tap, "made-here")
    with pytest.raises(BucketMissing, match="made-here"):
        store.get("k")
    store.ensure_bucket()
    store.ensure_bucket()
    assert tap.count("create_bucket") == 1
    store.put("k", b"v")
    assert store.get("k") == b"v"


def test_a_missing_bucket_on_aws_is_a_named_error(tap: Tap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects.clients, "is_aws", lambda endpoint: True)
    with pytest.raises(BucketMissing, match="never-made"):
        ObjectStore(tap, "never-made").ensure_bucket()
    assert tap.count("create_bucket") == 0


@pytest.mark.server
def test_wrong_credentials_are_a_named_error(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "NOBODY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreDenied, match="AWS_ACCESS_KEY_ID"):
        ObjectStore.connect(StoreSection(endpoint_url=s3.endpoint_url)).ensure_bucket()


@pytest.fixture
def anyone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anyone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "anything")


def test_nothing_listening_is_one_clear_error(anyone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "START_DEADLINE_S", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(StoreUnavailable, match=url):
        ObjectStore.connect(StoreSection(endpoint_url=url)).ensure_bucket()


@pytest.mark.slow
def test_a_mute_endpoint_is_told_in_time(anyone: None) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="AWS_ENDPOINT_URL_S3"):
            ObjectStore.connect(StoreSection(endpoint_url=url)).ensure_bucket()
        assert time.monotonic() - began < 15, "the promise of ensure_bucket"


def test_one_client_per_process_and_no_pickling(section: StoreSection) -> None:
    store = ObjectStore.connect(section)
    assert ObjectStore.connect(section).client is store.client
    with pytest.raises(TypeError, match="connect"):
        pickle.dumps(store)
    assert pickle.loads(pickle.dumps(section)) == section


def test_a_proxy_of_the_environment_does_not_catch_loopback(
    section: StoreSection, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    clients._client.cache_clear()
    store = ObjectStore.connect(section)
    store.put(prefix + "k", b"v")
    assert store.get(prefix + "k") == b"v" and store.exists(prefix + "k")


def test_plain_http_to_another_machine_warns(anyone: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ObjectStore.connect(StoreSection(endpoint_url="http://store.example:9000"))
        ObjectStore.connect(StoreSection(endpoint_url="http://127.0.0.1:9000"))
    assert [r.message for r in caplog.records if "plain http" in r.message] == [
        "http://store.example:9000: plain http to another machine: samples and weights travel unencrypted"
    ]
