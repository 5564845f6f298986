"""What lies in the store, how old it is, and what was left half-written: for garbage collection and for people.

Invariant: an age is told by one clock, the server's: the object's LastModified against the Date of the very answer
that carries it. It is good to a second and never negative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

from infra.store.errors import NotFound, StoreError
from infra.store.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a listing."""

    key: str
    size: int
    age_s: float


def entries(store: ObjectStore, prefix: str) -> Iterator[Entry]:
    """The objects under `prefix`, in the order of their keys; a thousand per request."""
    for page in store.pages(prefix):
        for found in page.get("Contents", ()):
            yield Entry(found["Key"], found["Size"], _age_s(page, found["LastModified"]))


def age_s(store: ObjectStore, key: str) -> float:
    """Seconds since the object was written. Raises NotFound."""
    found = store.attempt(f"HEAD {key}", lambda: store.client.head_object(Bucket=store.bucket, Key=key))
    return _age_s(found, found["LastModified"])


def abort_uploads(store: ObjectStore, prefix: str, doomed: Callable[[str], bool]) -> int:
    """Give up the unfinished multipart uploads under `prefix` whose key is `doomed`; how many there were."""
    aborted, more = 0, dict[str, str]()
    while True:
        request = partial(store.client.list_multipart_uploads, Bucket=store.bucket, Prefix=prefix, **more)
        page = store.attempt(f"LIST (uploads) {prefix}", request)
        for upload in page.get("Uploads", ()):
            if upload["Key"].startswith(prefix) and doomed(upload["Key"]):
                _abort(store, upload["Key"], upload["UploadId"])
                aborted += 1
        if not page.get("IsTruncated"):
            return aborted
        more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def _abort(store: ObjectStore, key: str, upload: str) -> None:
    request = partial(store.client.abort_multipart_upload, Bucket=store.bucket, Key=key, UploadId=upload)
    with suppress(NotFound):  # it was completed or given up meanwhile
        store.attempt(f"DELETE (upload) {key}", request)


def _age_s(answer: Any, modified: datetime) -> float:
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    if date is None:
        raise StoreError("the S3 server sends no Date header: the age of its objects can not be told")
    return max(0.0, (parsedate_to_datetime(date) - modified).total_seconds())
