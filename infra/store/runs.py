"""Which runs a bucket holds.

Invariant: told by the keys alone, a request for every tenant and one for every run, whatever the runs hold.
"""

from __future__ import annotations

from collections.abc import Iterator

from infra.store.objects import ObjectStore

BEHIND = chr(ord("/") + 1)
"""Sorts right behind the slash."""


def run_prefixes(store: ObjectStore, tenant: str | None = None) -> Iterator[str]:
    """The prefixes of the runs, `{tenant}/{run}/`, in order; of one tenant if given."""
    owners = (p for p in _below(store, "") if not p.startswith("_")) if tenant is None else iter([f"{tenant}/"])
    for owner in owners:
        for prefix in _below(store, owner):
            if store.exists(f"{prefix}config.json"):
                yield prefix


def _below(store: ObjectStore, prefix: str) -> Iterator[str]:
    """What would be the directories right below a prefix: the first key tells the first one, and the first key behind
    all of that one's keys the next."""
    after: str | None = None
    while (key := next(store.keys(prefix, after), None)) is not None:
        name, slash, _ = key.removeprefix(prefix).partition("/")
        if slash:
            yield f"{prefix}{name}/"
        after = f"{prefix}{name}{BEHIND}" if slash else key
