"""S3 requests by operation, and what they cost.

Invariant: what is counted is what is sent, repetitions included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PRICED_ON = "2025"
DOLLARS_PER_1000 = {
    "PutObject": 0.005,
    "ListObjectsV2": 0.005,
    "GetObject": 0.0004,
    "HeadObject": 0.0004,
    "DeleteObjects": 0.0,
}
"""AWS's public prices of S3 Standard in us-east-1, as published in `PRICED_ON`; storage and traffic come on top."""


@contextmanager
def counted(client: Any) -> Iterator[Counter[str]]:
    """The requests that this boto3 client sends meanwhile, by operation."""
    found: Counter[str] = Counter()

    def note(event_name: str, **_: Any) -> None:
        found[event_name.rsplit(".", 1)[-1]] += 1

    client.meta.events.register("before-send.s3", note)
    try:
        yield found
    finally:
        client.meta.events.unregister("before-send.s3", note)


def dollars(requests: Counter[str]) -> float:
    """Their price. Raises KeyError for an operation without one."""
    return sum(n * DOLLARS_PER_1000[operation] / 1000 for operation, n in requests.items())
