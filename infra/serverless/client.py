"""Invoking functions, on AWS or on the local endpoint: boto3's `lambda.invoke`, and nothing else.

Invariants
- There is one retry loop, here (boto3's own is off). Throttling, 5xx and broken connections are repeated, with jitter,
  until the deadline; timeouts and crashes of the function `TRIES` times, for what crashes a function may do so always.
- An event above the limit travels as an object in S3, which is deleted afterwards.
- What comes back is the function's answer or a named error, within the deadline.
"""

from __future__ import annotations

import base64
import json
import random
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.client import Config
from botocore.exceptions import BotoCoreError, ClientError

from infra.serverless.errors import FunctionFailed, FunctionMissing, InvocationFailed
from infra.store.errors import StoreError
from infra.store.objects import ObjectStore

PAYLOAD_LIMIT = 6 * 1024 * 1024
"""Bytes of a synchronous request."""
PAYLOADS = "_rollmill/payloads/"
"""Prefix of larger ones in the bucket; the deployed functions may read it."""
TRIES = 3
PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0
_PASSING = ("Sandbox.", "Runtime.ExitError", "Runtime.OutOfMemory", "Runtime.Unknown")
"""Beginnings of the `errorType` of what another try may not meet."""
_MISSING = {"ResourceNotFoundException", "AccessDeniedException", "UnrecognizedClientException"}


def lambda_client(region: str, endpoint_url: str | None, read_timeout_s: float, connections: int) -> Any:
    """A boto3 client without retries. `endpoint_url` None: AWS_ENDPOINT_URL_LAMBDA, then AWS. The local endpoint
    takes any credentials."""
    host = urlsplit(endpoint_url).hostname if endpoint_url else None
    more: dict[str, Any] = {}
    if host == "127.0.0.1":
        more = {"aws_access_key_id": "local", "aws_secret_access_key": "local"}
    return boto3.session.Session().client(
        "lambda",
        region_name=region,
        endpoint_url=endpoint_url,
        config=Config(
            connect_timeout=3.0,
            read_timeout=read_timeout_s,
            retries={"total_max_attempts": 1},
            max_pool_connections=connections,
            **({"proxies": {}} if more else {}),
        ),
        **more,
    )


@dataclass(frozen=True)
class Answer:
    """Of one invocation that succeeded."""

    value: Any
    log: str
    """The last 4 KB of the function's log; empty unless asked for."""


class FunctionClient:
    """Functions called `<prefix>-<name>`. Safe to share between threads, not between processes."""

    def __init__(
        self,
        client: Any,
        prefix: str,
        store: ObjectStore | None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ):
        self._client, self._prefix, self._store = client, prefix, store
        self._clock, self._pause = clock, pause

    def invoke(self, function: str, event: Any, deadline_s: float, log: bool = False) -> Answer:
        """The answer to an event (JSON types). Raises InvocationFailed, FunctionFailed, FunctionMissing."""
        name = f"{self._prefix}-{function}"
        body = json.dumps(event, separators=(",", ":")).encode()
        if len(body) <= PAYLOAD_LIMIT:
            return self._retry(name, body, deadline_s, log)
        if self._store is None:
            raise FunctionFailed(
                f"function {name}: an event of {len(body) / 2**20:.1f} MiB is above Lambda's 6 and there is no store"
            )
        key = f"{PAYLOADS}{uuid.uuid4().hex}.json"
        try:
            self._store.put(key, body)
            pointer = json.dumps({"s3": {"bucket": self._store.bucket, "key": key}}).encode()
            return self._retry(name, pointer, deadline_s, log)
        except StoreError as error:
            raise InvocationFailed(f"function {name}: its event can not be stored: {error}") from error
        finally:
            with suppress(StoreError):  # it is in nobody's way
                self._store.delete([key])

    def check(self, function: str) -> None:
        """Raises FunctionMissing unless it is there and may be invoked, InvocationFailed when nobody answers."""
        name = f"{self._prefix}-{function}"
        try:
            self._client.invoke(FunctionName=name, InvocationType="DryRun", Payload=b"{}")
        except (ClientError, BotoCoreError) as error:
            if isinstance(error, ClientError) and _code(error) in _MISSING:
                raise _missing(name, error) from error
            raise InvocationFailed(f"function {name}: {error}") from error

    def _retry(self, name: str, body: bytes, deadline_s: float, log: bool) -> Answer:
        end, pause, crashes = self._clock() + deadline_s, PAUSE_S, 0
        while True:
            try:
                answer = self._client.invoke(FunctionName=name, Payload=body, LogType="Tail" if log else "None")
                payload = answer["Payload"].read()
            except ClientError as error:
                status = error.response["ResponseMetadata"]["HTTPStatusCode"]
                if _code(error) in _MISSING:
                    raise _missing(name, error) from error
                if status != 429 and status < 500:
                    raise FunctionFailed(f"function {name}: {error}") from error
                why = f"{status} {_code(error)}"
            except BotoCoreError as error:  # a read timeout among them: the function goes on, its answer is lost
                why = str(error)
            else:
                if "FunctionError" not in answer:
                    return Answer(_parsed(name, payload), _log(answer))
                why = _told(payload)
                crashes += 1
                if crashes == TRIES or not why.startswith(_PASSING):
                    raise (InvocationFailed if crashes == TRIES else FunctionFailed)(f"function {name}: {why}")
            wait = pause * random.uniform(0.5, 1.0)  # jitter: what was throttled together must not come back together
            if self._clock() + wait >= end:
                raise InvocationFailed(f"function {name}: no answer within {deadline_s:g} s; last: {why}")
            self._pause(wait)
            pause = min(2 * pause, LONGEST_PAUSE_S)


def _code(error: ClientError) -> str:
    return error.response["Error"].get("Code", "")


def _missing(name: str, error: ClientError) -> FunctionMissing:
    return FunctionMissing(
        f"function {name}: {_code(error)}; deploy it (rollmill rewards deploy) or correct the section serverless"
    )


def _parsed(name: str, payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except ValueError as error:
        raise FunctionFailed(f"function {name}: its answer is not JSON: {payload[:200]!r}") from error


def _told(payload: bytes) -> str:
    """`errorType: errorMessage` of a failed function. AWS leaves the type out for some timeouts."""
    try:
        tree = json.loads(payload)
        return f"{tree.get('errorType') or 'Runtime.Unknown'}: {tree.get('errorMessage', '')}"
    except (ValueError, AttributeError):
        return f"Runtime.Unknown: {payload[:200]!r}"


def _log(answer: dict[str, Any]) -> str:
    return base64.b64decode(answer.get("LogResult", "")).decode(errors="replace")
