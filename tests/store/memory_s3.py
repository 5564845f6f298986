"""S3 in memory, to the boto3 client's calls that `ObjectStore` makes, and a wire to it that is cut at any operation.

`MemoryS3` is one linearisable server. `Wire` is one process's client of it: at the operation that it is told, it dies
before or after it (`Crash`), loses the answer, is refused as by a busy server, stays away for longer than any deadline,
or lets another process act first.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import format_datetime
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

from botocore.exceptions import ClientError, ReadTimeoutError

LISTED = 3
"""Keys per page: small, so that pages are turned."""


class Crash(BaseException):
    """The process was killed. No handler of the code under test may catch it."""


class MemoryS3:
    """Objects of one bucket with their metadata."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, dict[str, str], float]] = {}
        """Body, metadata, and when it was written."""
        self.now = 0.0
        """Seconds since the epoch, by the server's clock. Only a test moves it on."""
        self.deleted: list[str] = []
        self.operations = self.writes = 0
        self.struck = False
        """Whether anything befell any wire."""
        self.meta = SimpleNamespace(endpoint_url="http://memory")

    def copy(self) -> MemoryS3:
        """The same objects and time, for another history."""
        twin = MemoryS3()
        twin.objects, twin.now = dict(self.objects), self.now
        return twin

    def put_object(
        self, Bucket: str, Key: str, Body: bytes, IfNoneMatch: str | None = None, Metadata: dict[str, str] | None = None
    ) -> dict[str, Any]:
        if IfNoneMatch == "*" and Key in self.objects:
            raise answer(412, "PreconditionFailed")
        self.writes += 1
        self.objects[Key] = (bytes(Body), dict(Metadata or {}), self.now)
        return self._dated({})

    def get_object(self, Bucket: str, Key: str, Range: str | None = None) -> dict[str, Any]:
        body, metadata, _ = self._found(Key)
        more = {}
        if Range is not None:
            first, _, last = Range.removeprefix("bytes=").partition("-")
            total, body = len(body), body[int(first) : int(last) + 1]
            more = {"ContentRange": f"bytes {first}-{int(first) + len(body) - 1}/{total}"}
        return self._dated({"Body": io.BytesIO(body), "ContentLength": len(body), "Metadata": metadata} | more)

    def head_object(self, Bucket: str, Key: str) -> dict[str, Any]:
        body, metadata, written = self._found(Key)
        return self._dated({"ContentLength": len(body), "Metadata": metadata, "LastModified": _moment(written)})

    def list_objects_v2(
        self, Bucket: str, Prefix: str, StartAfter: str = "", ContinuationToken: str = ""
    ) -> dict[str, Any]:
        after = max(StartAfter, ContinuationToken)
        keys = [key for key in sorted(self.objects) if key.startswith(Prefix) and key > after]
        found = [
            {"Key": key, "Size": len(self.objects[key][0]), "LastModified": _moment(self.objects[key][2])}
            for key in keys[:LISTED]
        ]
        page: dict[str, Any] = {"Contents": found, "IsTruncated": len(keys) > LISTED}
        if page["IsTruncated"]:
            page["NextContinuationToken"] = keys[LISTED - 1]
        return self._dated(page)

    def list_multipart_uploads(self, Bucket: str, Prefix: str) -> dict[str, Any]:
        return self._dated({"IsTruncated": False})

    def delete_objects(self, Bucket: str, Delete: dict[str, Any]) -> dict[str, Any]:
        self.writes += 1
        for entry in Delete["Objects"]:
            self.objects.pop(entry["Key"], None)
            self.deleted.append(entry["Key"])
        return {}

    def _dated(self, found: dict[str, Any]) -> dict[str, Any]:
        date = format_datetime(_moment(self.now), usegmt=True)
        return found | {"ResponseMetadata": {"HTTPStatusCode": 200, "HTTPHeaders": {"date": date}}}

    def _found(self, key: str) -> tuple[bytes, dict[str, str], float]:
        if key not in self.objects:
            raise answer(404, "NoSuchKey")
        return self.objects[key]


def answer(status: int, code: str) -> ClientError:
    """An error as the server would send it."""
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "op")


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


class Fate(StrEnum):
    """What happens at the chosen operation."""

    CRASH_BEFORE = "crash before"
    CRASH_AFTER = "crash after"
    LOSE_ANSWER = "lose the answer"
    FAIL = "fail"
    CUT_BEFORE = "cut before"
    CUT_AFTER = "cut after"
    MEANWHILE = "meanwhile"


def nothing() -> None:
    """Nobody acts."""


class Wire:
    """A process's client, with its clock: pauses take no time but move it on."""

    def __init__(self, server: MemoryS3) -> None:
        self.server, self.meta = server, server.meta
        self.now = 0.0
        self._countdown = -1
        self._creates_only = False
        self._fate, self._meanwhile = Fate.FAIL, nothing
        self._gone: Callable[[], BaseException] | None = None
        self._lock = threading.RLock()

    def at(
        self, operation: int, fate: Fate, meanwhile: Callable[[], None] = nothing, creates_only: bool = False
    ) -> None:
        """Let this befall the `operation`-th operation from now, counted from 0, or the `operation`-th create."""
        self._countdown, self._fate, self._meanwhile, self._creates_only = operation, fate, meanwhile, creates_only

    def spare(self) -> None:
        """Let nothing befall it any more; what is cut is mended."""
        self._countdown, self._gone = -1, None

    def clock(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += max(seconds, 0.01)

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self.server, name)
        return lambda **arguments: self._call(name, operation, arguments)

    def _call(self, name: str, operation: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        with self._lock:
            if self._gone is not None:
                raise self._gone()
            self.server.operations += 1
            due = False
            if self._countdown >= 0 and not (self._creates_only and "IfNoneMatch" not in arguments):
                due, self._countdown = self._countdown == 0, self._countdown - 1
            if not due:
                return operation(**arguments)
            fate, self.server.struck = self._fate, True
            if fate is Fate.FAIL:
                raise answer(503, "SlowDown")
            if fate is Fate.MEANWHILE:
                self._meanwhile()
                return operation(**arguments)
            if fate in (Fate.CRASH_AFTER, Fate.LOSE_ANSWER, Fate.CUT_AFTER):
                with suppress(ClientError):  # what the server answers is lost, whatever it is
                    operation(**arguments)
            if fate in (Fate.CRASH_BEFORE, Fate.CRASH_AFTER):
                self._gone = Crash
            elif fate in (Fate.CUT_BEFORE, Fate.CUT_AFTER):
                self._gone = self._timeout
            raise self._gone() if self._gone is not None else self._timeout()

    def _timeout(self) -> Exception:
        return ReadTimeoutError(endpoint_url=self.meta.endpoint_url)
