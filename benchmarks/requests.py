"""S3 requests by operation, and what they cost.

Invariant: what is counted is what is sent, repetitions included: a store's client repeats nothing by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from infra.store.objects import ObjectStore

PRICED_ON = "2025"
DOLLARS_PER_1000 = {
    "put_object": 0.005,
    "list_objects_v2": 0.005,
    "get_object": 0.0004,
    "head_object": 0.0004,
    "delete_objects": 0.0,
}
"""AWS's public prices of S3 Standard in us-east-1, as published in `PRICED_ON`; storage and traffic come on top."""


class _Counting:
    """A client, each call of which is one request."""

    def __init__(self, client: Any, found: Counter[str]) -> None:
        self._client, self._found = client, found

    def __getattr__(self, name: str) -> Any:
        if name.endswith(("_object", "_objects", "_objects_v2")):
            self._found[name] += 1
        return getattr(self._client, name)


@contextmanager
def counted(store: ObjectStore) -> Iterator[Counter[str]]:
    """The requests that this store sends meanwhile, by operation."""
    found: Counter[str] = Counter()
    client, store.client = store.client, _Counting(store.client, found)
    try:
        yield found
    finally:
        store.client = client


def dollars(requests: Counter[str]) -> float:
    """Their price. Raises KeyError for an operation without one."""
    return sum(n * DOLLARS_PER_1000[operation] / 1000 for operation, n in requests.items())
