"""The named errors of the store.

Each message says what was tried, what came back and what to check; the command line shows it as one line.
"""

from __future__ import annotations

import copyreg
from typing import Any

from rl.errors import RollmillError


class StoreError(RollmillError):
    """The store answered with something that is neither success nor one of the errors below."""

    def __reduce__(self) -> tuple[Any, ...]:
        # a subclass's arguments are not its message: what is pickled (by Dask) is restored without __init__
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class StoreUnavailable(StoreError):
    """The endpoint did not answer, or only with 5xx, until the deadline. The outcome of a write is unknown."""


class StoreFull(StoreUnavailable):
    """The server has no space left: it says so, or it went on failing a write while it answered reads."""


class StoreDenied(StoreError):
    """Credentials are missing, wrong, or not allowed to do this."""


class BucketMissing(StoreError):
    """The bucket does not exist."""


class NotFound(StoreError):
    """No object under this key."""

    def __init__(self, bucket: str, key: str) -> None:
        super().__init__(f"s3://{bucket}/{key}: no such object")
        self.key = key


class StoreNotAtomic(StoreError):
    """The server ignores create-if-absent (`If-None-Match: *`): two trainers could both win one log record."""


class Corrupt(StoreError):
    """An object is not what it must be: wrong hash or size, unreadable, or missing though a record names it."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key, self.reason = key, reason


class SchemaTooNew(StoreError):
    """A segment was written by a newer Rollmill; this one would misread it."""


class SegmentTaken(StoreError):
    """Another writer used the same writer name and sequence number for other groups."""


class Overtaken(StoreError):
    """A record by somebody else (an operator's settle, say) came first and this one no longer holds."""
