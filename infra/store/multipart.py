"""One S3 object that is sent in parts.

Invariants: every part is repeated for itself when a request fails; the object appears with `finish`, whole, or not at
all. A `finish` whose answer was lost is recognised: the server no longer knows the upload, and the object is there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError

Attempt = Callable[[str, Callable[[], Any]], Any]
"""Runs a request with repetitions, and names its errors (`ObjectStore.attempt`)."""


class MultipartUpload:
    """See `infra.store.directories.Upload`."""

    def __init__(self, client: Any, bucket: str, key: str, part_bytes: int, attempt: Attempt) -> None:
        self._client, self._key, self._part_bytes, self._attempt = client, key, part_bytes, attempt
        self._sent: dict[int, str] = {}
        self._sent_bytes = 0
        self._lock = threading.Lock()
        self._where: dict[str, Any] = {"Bucket": bucket, "Key": key}
        answer = attempt(f"POST {key}", lambda: client.create_multipart_upload(**self._where))
        self._upload = {**self._where, "UploadId": answer["UploadId"]}

    def send(self, start: int, body: bytes) -> None:
        number = start // self._part_bytes + 1
        answer = self._attempt(
            f"PUT {self._key}", lambda: self._client.upload_part(**self._upload, PartNumber=number, Body=body)
        )
        with self._lock:
            self._sent[number] = answer["ETag"]
            self._sent_bytes += len(body)

    def finish(self) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._sent.items())]
        self._attempt(f"POST {self._key}", lambda: self._complete({"Parts": parts}))

    def _complete(self, parts: dict[str, Any]) -> None:
        try:
            self._client.complete_multipart_upload(**self._upload, MultipartUpload=parts)
        except ClientError as error:
            if error.response["Error"]["Code"] != "NoSuchUpload":
                raise
            if self._client.head_object(**self._where)["ContentLength"] != self._sent_bytes:
                raise error from None

    def abandon(self) -> None:
        self._attempt(f"DELETE {self._key}", lambda: self._client.abort_multipart_upload(**self._upload))
