"""The local endpoint as boto3 sees it: the real client, the real handler in real processes."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from botocore.exceptions import ClientError

from infra.serverless.client import lambda_client
from infra.serverless.local import REQUEST_BYTES
from tests.serverless.conftest import Serve, Served, event, eventually, view

pytestmark = pytest.mark.slow


def invoke(served: Served, payload: bytes, function: str = "toys", **more: Any) -> dict[str, Any]:
    client = lambda_client("us-east-1", served.url, 120, connections=1)
    answer = client.invoke(FunctionName=f"t-{function}", Payload=payload, **more)
    return answer | {"body": json.loads(answer["Payload"].read() or b"null")}


def parts(answer: dict[str, Any]) -> dict[str, float]:
    assert "FunctionError" not in answer, answer
    return answer["body"]["results"][0]["parts"]


def encoded(*args: Any, **options: Any) -> bytes:
    return json.dumps(event(*args, **options)).encode()


def test_a_process_is_started_once_and_serves_again(serve: Serve) -> None:
    served = serve()
    first, second = (parts(invoke(served, encoded("process")))["pid"] for _ in range(2))
    assert first == second != os.getpid() and served.endpoint.processes == 1


def test_the_log_carries_what_was_printed_and_the_report(serve: Serve) -> None:
    served = serve()
    client = served.client()
    cold, warm = (client.invoke("toys", event("good"), 60, log=True).log for _ in range(2))
    assert "scoring 7" in cold and "Init Duration" in cold and "Memory Size: 400 MB" in cold
    assert "scoring 7" in warm and "Init Duration" not in warm and warm.count("REPORT") == 1
    assert "scoring 7" in (served.logs / "toys.log").read_text()


def test_a_function_that_times_out_is_ended_and_replaced(serve: Serve, tmp_path: Path) -> None:
    served = serve()
    answer = invoke(served, encoded("endless", begun=str(tmp_path)), "hasty")
    assert answer["StatusCode"] == 200 and answer["FunctionError"] == "Unhandled"
    assert answer["body"]["errorType"] == "Sandbox.Timedout" and "1.00 seconds" in answer["body"]["errorMessage"]
    (begun,) = tmp_path.iterdir()
    eventually(lambda: not psutil.pid_exists(int(begun.name)))
    assert parts(invoke(served, encoded("good"))) == {"good": 0.5}


@pytest.mark.parametrize(("toy", "kind"), [("crash", "Runtime.ExitError"), ("hog", "Runtime.OutOfMemory")])
def test_a_function_that_dies_says_how_and_is_replaced(serve: Serve, toy: str, kind: str) -> None:
    served = serve()
    answer = invoke(served, encoded(toy))
    assert answer["FunctionError"] == "Unhandled" and answer["body"]["errorType"] == kind
    assert parts(invoke(served, encoded("good"))) == {"good": 0.5}


def test_a_handler_that_can_not_be_imported_says_so(serve: Serve) -> None:
    answer = invoke(serve(handler="nowhere.handler"), encoded("good"))
    assert answer["FunctionError"] == "Unhandled" and answer["body"]["errorType"] == "Runtime.ImportModuleError"


def test_the_bundle_is_all_there_is(serve: Serve) -> None:
    """A module of this environment that no reward requires is missing in the function, as on AWS."""
    answer = invoke(serve(handler="torch.nothing"), encoded("good"))
    assert answer["body"]["errorType"] == "Runtime.ImportModuleError"


def test_one_more_than_the_concurrency_is_throttled(serve: Serve, tmp_path: Path) -> None:
    served, gate = serve(concurrency=2), tmp_path / "gate"
    with ThreadPoolExecutor(2) as pool:
        held = [pool.submit(invoke, served, encoded("waiting", gate=str(gate))) for _ in range(2)]
        eventually(lambda: len(list(tmp_path.iterdir())) == 2)
        with pytest.raises(ClientError) as caught:
            invoke(served, encoded("good"))
        gate.touch()
        assert all(parts(future.result(30)) == {"waited": 1.0} for future in held)
    response = caught.value.response
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 429
    assert response["Error"]["Code"] == "TooManyRequestsException"
    assert response["Reason"] == "ConcurrentInvocationLimitExceeded"


def test_six_megabytes_each_way_and_no_more(serve: Serve) -> None:
    served = serve()
    padding = REQUEST_BYTES - len(encoded("good", view("")))
    assert parts(invoke(served, encoded("good", view("x" * padding)))) == {"good": 0.5}
    with pytest.raises(ClientError, match="RequestEntityTooLargeException") as caught:
        invoke(served, encoded("good", view("x" * (padding + 1))))
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 413
    answer = invoke(served, encoded("many", parts=400_000))
    assert answer["FunctionError"] == "Unhandled" and answer["body"]["errorType"] == "Function.ResponseSizeTooLarge"


def test_what_is_no_request_is_refused_by_name(serve: Serve) -> None:
    served = serve()
    with pytest.raises(ClientError, match="InvalidRequestContentException"):
        invoke(served, b"{no json")
    with pytest.raises(ClientError, match="InvalidParameterValueException"):
        invoke(served, b"{}", InvocationType="Event")
    client = lambda_client("us-east-1", served.url, 60, connections=1)
    with pytest.raises(ClientError, match="ResourceNotFoundException"):
        client.invoke(FunctionName="t-other", Payload=b"{}")
    assert served.endpoint.processes == 0


def test_it_scales_to_zero(serve: Serve) -> None:
    served = serve(idle_s=0.5)
    pid = int(parts(invoke(served, encoded("process")))["pid"])
    eventually(lambda: served.endpoint.processes == 0)
    eventually(lambda: not psutil.pid_exists(pid))
    assert parts(invoke(served, encoded("process")))["pid"] != pid


def test_a_process_killed_while_idle_is_not_used_again(serve: Serve) -> None:
    served = serve()
    pid = int(parts(invoke(served, encoded("process")))["pid"])
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(pid))
    client = served.client()
    assert client.invoke("toys", event("process"), 60).value["results"][0]["parts"]["pid"] != pid
