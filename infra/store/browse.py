"""Looking at sealed groups and at what became of them: for people, never for decisions.

Invariants: read from the store alone, newest version first, a bounded number of segments in memory; a segment that is
deleted meanwhile is left out; what became of an attempt is what the log says, on the live line of now.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa

from infra.store import schema
from infra.store.errors import Corrupt, NotFound
from infra.store.objects import ObjectStore
from rl.records import Record, Rollback, Settle, Step
from rl.trajectory import Group, Uid

AT_ONCE = 16
"""Segments read, and held, at once."""
_SEGMENT = re.compile(r"groups/(\d{10})/(.+)\.parquet$")


class State(StrEnum):
    """What became of a sealed copy of an attempt."""

    TRAINED = "trained"
    DROPPED = "dropped"
    OPEN = "open"
    COPY = "copy"
    """Another copy of the attempt was trained."""


@dataclass(frozen=True, slots=True)
class Fate:
    """`version` is what trained it, `reason` why it was dropped."""

    state: State
    version: int | None = None
    reason: str = ""
    segment: str = ""

    def __str__(self) -> str:
        return f"{self.state} v{self.version}" if self.version is not None else f"{self.state} {self.reason}".rstrip()


@dataclass(frozen=True, slots=True)
class Sample:
    """A sealed group, where it lies (below the run), and its fate."""

    segment: str
    group: Group
    fate: Fate


OPEN = Fate(State.OPEN)
COPY = Fate(State.COPY)


def fates(records: Iterable[Record]) -> dict[Uid, Fate]:
    """What became of every closed attempt. `records` is the log from its beginning."""
    found: dict[Uid, Fate] = {}
    line: list[int] = []
    for record in records:
        if isinstance(record, Step):
            line.append(record.version)
            places = record.segments or [""] * len(record.trained)
            for text, segment in zip(record.trained, places, strict=False):
                found[Uid.parse(text)] = Fate(State.TRAINED, record.version, segment=segment)
        if isinstance(record, Step | Settle):
            found |= {Uid.parse(drop.uid): Fate(State.DROPPED, reason=drop.reason.value) for drop in record.dropped}
        if isinstance(record, Rollback) and record.to in line:
            gone = set(line[line.index(record.to) + 1 :])
            line = [version for version in line if version not in gone]
            undone = Fate(State.DROPPED, reason="rolled_back")
            found |= {uid: undone for uid, fate in found.items() if fate.version in gone}
    return found


class Browser:
    """The sealed groups of one run. `prefix` is the run's, with a closing slash; `closed` is what `fates` found."""

    def __init__(self, store: ObjectStore, prefix: str, closed: dict[Uid, Fate]) -> None:
        self._store, self._prefix, self._closed = store, prefix, closed

    def samples(self, version: int | None = None) -> Iterator[Sample]:
        """Every sealed group, of one version if given, newest version first."""
        under = "groups/" if version is None else f"groups/{version:010d}/"
        return self._samples(self._keys(under)[::-1])

    def fate(self, uid: Uid) -> Fate:
        """What the log says of an attempt."""
        return self._closed.get(uid, OPEN)

    def find(self, uid: Uid) -> Sample | None:
        """The copy of an attempt that was trained, or else one that is there."""
        fate = self.fate(uid)
        if fate.segment:
            keys = [fate.segment]
        else:  # by name first: a segment is usually of one group and named after it
            keys = sorted(self._keys("groups/"), key=lambda key: f"{uid.ordinal:010d}-{uid.attempt:06d}" not in key)
        return next((sample for sample in self._samples(keys) if sample.group.uid == uid), None)

    def _keys(self, under: str) -> list[str]:
        listed = (key.removeprefix(self._prefix) for key in self._store.keys(self._prefix + under))
        return [key for key in listed if _SEGMENT.fullmatch(key)]

    def _samples(self, keys: Sequence[str]) -> Iterator[Sample]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for at in range(0, len(keys), AT_ONCE):
                some = keys[at : at + AT_ONCE]
                for key, groups in zip(some, pool.map(self._read, some), strict=True):
                    yield from (Sample(key, group, self._fate(group.uid, key)) for group in groups)

    def _fate(self, uid: Uid, key: str) -> Fate:
        fate = self.fate(uid)
        return COPY if fate.segment and fate.segment != key else fate

    def _read(self, key: str) -> list[Group]:
        try:
            return schema.decode(self._store.get(self._prefix + key))
        except NotFound:
            return []
        except (pa.ArrowException, KeyError) as error:
            raise Corrupt(key, f"not a segment: {error}") from error
