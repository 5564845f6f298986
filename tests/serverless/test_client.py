"""Invoking: what is repeated, what is not, how large an event may be, and by what name it fails."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, ReadTimeoutError

from infra.serverless.client import PAYLOADS, TRIES, FunctionClient, lambda_client
from infra.serverless.errors import FunctionFailed, FunctionMissing, InvocationFailed
from infra.services.endpoints import S3Endpoint
from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection
from tests.serverless.conftest import Serve, event, view


def test_more_calls_than_concurrency_are_all_answered(serve: Serve) -> None:
    client = serve(concurrency=1).client()
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda i: client.invoke("toys", event("good", factor=i), 120).value, range(6)))
    assert [answer["results"][0]["parts"]["good"] for answer in answers] == [0.5 * i for i in range(6)]


def test_a_crash_is_tried_again(serve: Serve, tmp_path: Path) -> None:
    client = serve().client()
    answer = client.invoke("toys", event("crash", once=str(tmp_path / "crashed")), 120)
    assert answer.value == {"results": [{"parts": {"crash": 1.0}}]}


def test_what_always_crashes_fails_by_name(serve: Serve) -> None:
    with pytest.raises(InvocationFailed, match=r"t-toys: Runtime\.ExitError: .*exit status 3"):
        serve().client().invoke("toys", event("crash"), 120)


def test_what_always_times_out_fails_by_name_after_some_tries(serve: Serve, tmp_path: Path) -> None:
    with pytest.raises(InvocationFailed, match=r"Sandbox.Timedout.*1\.00 seconds"):
        serve().client().invoke("hasty", event("endless", begun=str(tmp_path)), 120)
    assert len(list(tmp_path.iterdir())) == TRIES


def test_an_error_of_the_handler_itself_is_not_repeated(serve: Serve) -> None:
    with pytest.raises(FunctionFailed, match="ConfigError: the bundle has no reward 'toy_rewards:other'"):
        serve().client().invoke("toys", event("other"), 120)


def test_a_function_that_is_not_there_names_the_mend(serve: Serve) -> None:
    client = serve().client()
    with pytest.raises(FunctionMissing, match="t-other: ResourceNotFoundException; deploy it"):
        client.invoke("other", {}, 120)


class Scripted:
    """Stands for the network: answers and errors in order, the last one for ever."""

    def __init__(self, *script: Any):
        self.script, self.calls = list(script), 0

    def invoke(self, **_: Any) -> Any:
        self.calls += 1
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(step, Exception):
            raise step
        return step


class Clock:
    """Time passes by pauses only."""

    def __init__(self) -> None:
        self.now, self.pauses = 0.0, [0.0]

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)


def refused(status: int, code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Invoke")


@pytest.mark.parametrize(
    "error",
    [
        refused(429, "TooManyRequestsException"),
        refused(500, "ServiceException"),
        ReadTimeoutError(endpoint_url="http://function"),
    ],
)
def test_what_may_pass_is_repeated_until_the_deadline(error: Exception) -> None:
    network, clock = Scripted(error), Clock()
    client = FunctionClient(network, "p", None, clock, clock.pause)
    with pytest.raises(InvocationFailed, match="p-math: no answer within 30 s; last: "):
        client.invoke("math", {}, deadline_s=30)
    assert 20 < clock.now < 30 and network.calls == len(clock.pauses) > 5
    assert len(set(clock.pauses)) == len(clock.pauses)  # jitter


def test_what_will_not_pass_is_not_repeated() -> None:
    network, clock = Scripted(refused(400, "InvalidRequestContentException")), Clock()
    with pytest.raises(FunctionFailed, match="InvalidRequestContent"):
        FunctionClient(network, "p", None, clock, clock.pause).invoke("math", {}, 30)
    assert network.calls == 1


def test_nobody_at_the_endpoint_is_told_within_the_deadline() -> None:
    client = FunctionClient(lambda_client("us-east-1", "http://127.0.0.1:9", 5, connections=1), "p", None)
    with pytest.raises(InvocationFailed, match=r"no answer within 0\.5 s"):
        client.invoke("math", {}, 0.5)


LARGE = "x" * (7 << 20)


def test_a_large_event_without_a_store_fails_by_name(serve: Serve) -> None:
    with pytest.raises(FunctionFailed, match=r"7\.0 MiB is above Lambda's 6"):
        serve().client().invoke("toys", event("size", view(LARGE)), 120)


@pytest.mark.server
def test_a_large_event_travels_through_s3_and_leaves_nothing(
    serve: Serve, s3: S3Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": s3.access_key,
        "AWS_SECRET_ACCESS_KEY": s3.secret_key,
        "AWS_ENDPOINT_URL_S3": s3.endpoint_url,
    }.items():
        monkeypatch.setitem(os.environ, name, value)  # the function's process has them from here
    store = ObjectStore.connect(StoreSection(bucket=s3.bucket))
    client = serve().client(store)
    large = view(LARGE)
    sized = event("size", view("unused"))
    sized["views"][0]["messages"][0][1] = LARGE
    assert client.invoke("toys", sized, 120).value == {"results": [{"parts": {"size": float(len(LARGE))}}]}
    assert client.invoke("toys", event("good", large), 120).value == {"results": [{"parts": {"good": 0.5}}]}
    with pytest.raises(InvocationFailed):
        client.invoke("toys", event("crash", large), 120)
    assert list(store.keys(PAYLOADS)) == []
