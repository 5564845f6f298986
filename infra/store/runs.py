"""Which runs a bucket holds.

Invariant: told by the keys alone, a request for every tenant and one for every run, whatever the runs hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from infra.store.objects import ObjectStore


def run_prefixes(store: ObjectStore, tenant: str | None = None) -> Iterator[str]:
    """The prefixes of the runs, `{tenant}/{run}/`, in order; of one tenant if given."""
    owners = (p for p in _below(store, "") if not p.startswith("_")) if tenant is None else iter([f"{tenant}/"])
    for owner in owners:
        for prefix in _below(store, owner):
            if store.exists(f"{prefix}config.json"):
                yield prefix


def _below(store: ObjectStore, prefix: str) -> Iterator[str]:
    """What would be the directories right below a prefix."""
    more: dict[str, Any] = {}
    while True:
        request = partial(store.client.list_objects_v2, Bucket=store.bucket, Prefix=prefix, Delimiter="/", **more)
        page = store.attempt(f"LIST {prefix}", request)
        yield from (found["Prefix"] for found in page.get("CommonPrefixes", ()))
        if not page.get("IsTruncated"):
            return
        more = {"ContinuationToken": page["NextContinuationToken"]}
