"""Objects in one S3 bucket: get, put, create if absent, list, delete, on one client (`infra.store.clients`).

Invariants
- There is one retry loop, here (botocore's own is off): what may pass (`infra.store.faults`) is repeated until a
  deadline, then raised as `StoreUnavailable`, or as `StoreFull` when it is only writes that fail.
- `create` never reports somebody else's object as ours, nor ours as somebody else's: 200 is mine; 409, 5xx
  and timeouts repeat the same request; at 412 the object's nonce is read back and compared, since a repeated
  request may meet its own earlier success. The nonce is kept in the object's *metadata*: so the body stays
  what its format wants (a Parquet file too) and telling costs one HEAD, whatever the size.
- A log record is never deleted from here: a deleted one could be won again by a fenced trainer.
- Clients are per process: a store refuses to be pickled; send the `StoreSection` and `connect` there.
"""

from __future__ import annotations

import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

from botocore.exceptions import ClientError

from infra.store import clients, faults
from infra.store.errors import BucketMissing, NotFound, StoreError, StoreFull, StoreNotAtomic, StoreUnavailable
from infra.store.multipart import MultipartUpload
from rl.config.infrastructure import StoreSection

T = TypeVar("T")

DEADLINE_S = 60.0
"""For one operation with its repetitions; long enough for a server to be started again."""
START_DEADLINE_S = 4.0
"""The same for the first contact: with one read timeout on top, a dead endpoint is told within 15 s."""

_LOG_RECORD = re.compile(r"(^|/)log/\d+\.json$")


class ObjectStore:
    """One bucket through one boto3 client. Safe to share between threads, not between processes."""

    def __init__(
        self,
        client: Any,
        bucket: str,
        deadline_s: float = DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ):
        self.client = client
        self.bucket = bucket
        self._deadline_s, self._clock, self._pause = deadline_s, clock, pause

    @classmethod
    def connect(cls, section: StoreSection) -> ObjectStore:
        """The store that a configuration names, with this process's one client for it. Sends nothing yet."""
        return cls(clients.client(section), section.bucket)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an ObjectStore belongs to its process: send its StoreSection and connect() there")

    def get(self, key: str) -> bytes:
        """The object's body. Raises NotFound."""
        return self._retry(f"GET {key}", lambda: self._body(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from `start`, fewer where the object ends before. Raises NotFound."""
        return self._retry(f"GET {key}", lambda: self._piece(key, start, length))

    def exists(self, key: str) -> bool:
        """Whether there is an object under this key."""
        try:
            self._retry(f"HEAD {key}", lambda: self.client.head_object(Bucket=self.bucket, Key=key))
        except NotFound:
            return False
        return True

    def nonce(self, key: str) -> str | None:
        """The nonce that `create` made this object by; None when something else made it. Raises NotFound."""
        found = self._retry(f"HEAD {key}", lambda: self.client.head_object(Bucket=self.bucket, Key=key))
        return found["Metadata"].get("nonce")

    def put(self, key: str, body: bytes) -> None:
        """Write or overwrite."""
        self._retry(f"PUT {key}", lambda: self.client.put_object(Bucket=self.bucket, Key=key, Body=body))

    def upload(self, key: str, part_bytes: int) -> MultipartUpload:
        """Begin an object that is sent in parts of `part_bytes`, and is there when all of it is."""
        return MultipartUpload(self.client, self.bucket, key, part_bytes, self.attempt)

    def create(self, key: str, body: bytes, nonce: str) -> bool:
        """Create the object unless it exists; False when it is there already and not by this `nonce`: make one
        up for each object to be written (or take its content's hash), a reused one claims what it finds.

        Raises StoreUnavailable when that could not be settled in time: the object may or may not be ours;
        StoreNotAtomic when the server knows no such request.
        """
        return self._retry(f"PUT {key}", lambda: self._create(key, body, nonce), passing=faults.unsettled)

    def keys(self, prefix: str, start_after: str | None = None) -> Iterator[str]:
        """Keys under `prefix` in order, those behind `start_after` only; a thousand per request."""
        for page in self.pages(prefix, start_after):
            yield from (entry["Key"] for entry in page.get("Contents", ()))

    def pages(self, prefix: str, start_after: str | None = None) -> Iterator[Any]:
        """The same as the server's answers."""
        more: dict[str, Any] = {} if start_after is None else {"StartAfter": start_after}
        while True:
            page = self._retry(f"LIST {prefix}", partial(self._list, prefix, more))
            yield page
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def attempt(self, what: str, request: Callable[[], T]) -> T:
        """Any other request of `client`: repeated, and its errors named, as all are."""
        return self._retry(what, request)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; missing ones are no error. Raises ValueError for a log record."""
        doomed = list(keys)
        for key in doomed:
            if _LOG_RECORD.search(key):
                raise ValueError(f"{key}: a log record is never deleted")
        for at in range(0, len(doomed), 1000):
            self._retry("DELETE", partial(self._delete, doomed[at : at + 1000]))

    def ensure_bucket(self, create: bool = True) -> None:
        """Check that the bucket can be reached; create it, if missing and wished, on an explicit endpoint only.

        The first contact with a store: an endpoint that does not answer raises StoreUnavailable in under 15 s.
        """
        try:
            self._retry(
                "HEAD (bucket)",
                lambda: self.client.head_bucket(Bucket=self.bucket),
                deadline_s=START_DEADLINE_S,
            )
        except BucketMissing:
            if not create or clients.is_aws(self.client.meta.endpoint_url):
                raise
            try:
                self._retry("PUT (bucket)", lambda: self.client.create_bucket(Bucket=self.bucket))
            except StoreError as error:  # another process may have been faster
                cause = error.__cause__
                if not (isinstance(cause, ClientError) and cause.response["Error"]["Code"].startswith("BucketAlready")):
                    raise

    # -- single requests -----------------------------------------------------------------------------

    def _body(self, key: str) -> bytes:
        return self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def _piece(self, key: str, start: int, length: int) -> bytes:
        asked = f"bytes={start}-{start + length - 1}"
        try:
            answer = self.client.get_object(Bucket=self.bucket, Key=key, Range=asked)
        except ClientError as error:
            if faults.status(error) != 416:
                raise
            return b""
        return faults.piece(answer["Body"].read(), answer.get("ContentRange"), start, length)

    def _list(self, prefix: str, more: dict[str, Any]) -> Any:
        return faults.page(self.client.list_objects_v2(Bucket=self.bucket, Prefix=prefix, **more))

    def _create(self, key: str, body: bytes, nonce: str) -> bool:
        try:
            self.client.put_object(Bucket=self.bucket, Key=key, Body=body, IfNoneMatch="*", Metadata={"nonce": nonce})
        except ClientError as error:
            if faults.status(error) == 501:
                raise faults.not_atomic(error, self._where()) from error
            if faults.status(error) != 412:
                raise
            found = self.client.head_object(Bucket=self.bucket, Key=key)
            return found["Metadata"].get("nonce") == nonce
        return True

    def _delete(self, keys: list[str]) -> None:
        answer = self.client.delete_objects(
            Bucket=self.bucket, Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True}
        )
        if answer.get("Errors"):
            first = answer["Errors"][0]
            raise StoreError(f"{self._where()}: DELETE {first.get('Key')}: {first.get('Code')} {first.get('Message')}")

    # -- repetition and names of errors --------------------------------------------------------------

    def _retry(
        self,
        what: str,
        request: Callable[[], T],
        passing: Callable[[Exception], bool] | None = None,
        deadline_s: float | None = None,
    ) -> T:
        """Run `request` until it succeeds or fails for good, or the deadline passes."""
        passing = passing or faults.passes
        deadline_s = min(self._deadline_s, deadline_s or self._deadline_s)
        end = self._clock() + deadline_s
        pause = 0.05
        while True:
            try:
                return request()
            except faults.FAULTS as error:
                if not passing(error):
                    raise faults.named(error, self._where(), what, self.bucket) from error
                if self._clock() + pause > end:
                    raise self._expired(what, error, deadline_s) from error
            self._pause(pause * random.uniform(0.5, 1.0))  # jitter: racing writers must not repeat in step
            pause = min(pause * 2, 2.0)

    def _expired(self, what: str, error: Exception, deadline_s: float) -> StoreUnavailable:
        said = f"{self._where()}: {what} did not succeed within {deadline_s:.0f} s: {error}"
        if faults.full(error):
            return StoreFull(f"{said}; {faults.FREE}")
        if what.startswith(("PUT", "POST")) and faults.status(error) >= 500 and self._reads():
            return StoreFull(f"{said}; reads are answered, so its disk is probably full: {faults.FREE}")
        return StoreUnavailable(
            f"{said}; check that the server runs and that store.endpoint_url or AWS_ENDPOINT_URL_S3 names it"
        )

    def _reads(self) -> bool:
        try:
            self.client.head_bucket(Bucket=self.bucket)
        except faults.FAULTS:
            return False
        return True

    def _where(self) -> str:
        return f"S3 {self.client.meta.endpoint_url} bucket {self.bucket!r}"


RACERS = 8


def probe_atomicity(client: Any, bucket: str, prefix: str) -> None:
    """Race creates of one key; exactly one may win, and the object must hold the winner's body.

    Raises StoreNotAtomic for a server that ignores or lacks `If-None-Match: *`. Writes and deletes one small
    object under `prefix`.
    """
    where = f"S3 {client.meta.endpoint_url} bucket {bucket!r}"
    store = ObjectStore(client, bucket)
    for _ in range(5):  # a race may end without a winner when the server answers all of them 409 or 5xx
        key = f"{prefix}probe/{uuid.uuid4().hex}"
        line = threading.Barrier(RACERS)

        def race(racer: int, key: str = key, line: threading.Barrier = line) -> int | None:
            line.wait(timeout=10)
            try:
                client.put_object(Bucket=bucket, Key=key, Body=b"%d" % racer, IfNoneMatch="*")
            except faults.FAULTS as error:
                if faults.passes(error) or faults.status(error) in (409, 412):
                    return None  # lost, or unknown: then this race is judged by the others
                if faults.status(error) in (400, 501):
                    raise faults.not_atomic(error, where) from None
                raise faults.named(error, where, f"PUT {key}", bucket) from error
            return racer

        with ThreadPoolExecutor(RACERS) as pool:
            winners = [racer for racer in pool.map(race, range(RACERS)) if racer is not None]
        if len(winners) > 1:  # judged by that alone: such a server may answer anything from here on
            with suppress(StoreError):
                store.delete([key])
            raise StoreNotAtomic(
                f"{where}: {len(winners)} of {RACERS} racing creates of one key succeeded: the server ignores "
                "create-if-absent (If-None-Match: *); use another S3 server"
            )
        if winners:
            if not store.exists(key) or store.get(key) != b"%d" % winners[0]:
                raise StoreNotAtomic(f"{where}: a racing create that lost left its body; use another S3 server")
            store.delete([key])
            return
    raise StoreUnavailable(f"{where}: no create of a fresh key succeeded in five races; check the server's health")
