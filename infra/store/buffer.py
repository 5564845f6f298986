"""The sample buffer: sealed groups between rollout and training, as immutable segment objects.

    groups/{version:010d}/{writer}-{seq:06d}.parquet     sealed --(a step record names its uids)--> settled

Life of a group: `seal` makes it visible; every `refresh` offers it as a candidate while its attempt is open and
its version can still be trained; `take` gives it to the trainer; the record that trains or drops it makes all
readers forget it. Nothing here decides or consumes: the log does, by uid.

Invariants
- A segment is created once, with groups of one version; sealing the same again is harmless (Dask may run an
  admission twice): the first stands.
- A reader lists from the oldest version that can still be trained, so history costs nothing, and reads each
  object once. It forgets what is settled or older: its memory is bounded by the window.
- Of several sealed copies of one attempt one is offered, and `take`, `segments` and all later calls mean that
  very copy; the step record names its segment, so that a replay reads the same bytes.
- What is trained, or replayed, comes without `schema.TOLD`, which training does not need: `take` and `fetch` agree.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import BoundedSemaphore
from typing import NamedTuple

import pyarrow as pa

from infra.store import schema
from infra.store.errors import Corrupt, NotFound, SchemaTooNew, SegmentTaken
from infra.store.objects import ObjectStore
from rl.ledger import Ledger
from rl.records import Step
from rl.selection import Candidate
from rl.staleness import StalenessPolicy
from rl.trajectory import Group, Uid

READERS = 16
"""Objects read and decoded at once: both happen outside the interpreter's lock, for the most part."""
_SEGMENT = re.compile(r"groups/(\d{10})/[^/]+-\d{6,}\.parquet$")
_WRITER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class Receipt(NamedTuple):
    """A sealed segment: its key below the run, and its size in bytes."""

    key: str
    size: int


@dataclass(slots=True)
class _Segment:
    """A segment in memory, still encoded: small, and decoded only when it is trained."""

    version: int
    encoded: schema.Segment
    candidates: list[Candidate]


class SampleBuffer:
    """One run's buffer as one reader or writer sees it. `prefix` is the run's, with a closing slash. `seal` may
    be called from several threads; the reading side belongs to one."""

    def __init__(self, store: ObjectStore, prefix: str):
        self._store = store
        self._prefix = prefix
        self._seen: dict[str, int] = {}
        self._segments: dict[str, _Segment] = {}
        self._home: dict[Uid, str] = {}
        self._taken: set[Uid] = set()
        self._pool = ThreadPoolExecutor(READERS)
        # any number of threads seal; more at once than there are cores would only take each other's caches
        self._encoding = BoundedSemaphore(os.cpu_count() or 1)

    # -- writing -------------------------------------------------------------------------------------

    def seal(self, groups: Sequence[Group], writer: str, seq: int) -> Receipt:
        """Make closed groups of one version visible; returns where they lie.

        (`writer`, `seq`) name the segment and are used for these groups only. If the same attempts were sealed
        under that name before, what is there stands. Raises SegmentTaken when others were.
        """
        versions = {group.version for group in groups}
        if len(versions) != 1:
            raise ValueError(f"a segment holds groups of one version, not of {sorted(versions)}")
        if not _WRITER.fullmatch(writer):
            raise ValueError(f"writer {writer!r} is not a plain name")
        key = f"groups/{versions.pop():010d}/{writer}-{seq:06d}.parquet"
        with self._encoding:
            body = schema.encode(groups)
        # The content is the nonce: a second sealing of equal groups is ours, whoever did the first.
        if not self._store.create(self._prefix + key, body, hashlib.sha256(body).hexdigest()):
            there = {candidate.uid for candidate in self._read(key).candidates}
            if there != {group.uid for group in groups}:
                raise SegmentTaken(f"{key}: already holds {', '.join(map(str, sorted(there)))}; use another seq")
        return Receipt(key, len(body))

    # -- reading -------------------------------------------------------------------------------------

    def refresh(self, ledger: Ledger, policy: StalenessPolicy) -> list[Candidate]:
        """The sealed groups that are open and in the window, one copy of each, oldest version first."""
        floor = policy.floor(ledger)
        self._forget(ledger, floor)
        start = f"{self._prefix}groups/{floor:010d}/"
        listed = (key.removeprefix(self._prefix) for key in self._store.keys(f"{self._prefix}groups/", start))
        fresh = [key for key in listed if key not in self._seen and _SEGMENT.fullmatch(key)]
        for key, segment in zip(fresh, self._pool.map(self._read_listed, fresh), strict=True):
            if segment is not None:
                self._seen[key] = segment.version
                self._segments[key] = segment
        self._forget(ledger, floor)
        return self._offer(ledger)

    def take(self, uids: Sequence[Uid]) -> list[Group]:
        """The groups of these candidates, in this order, without `schema.TOLD`. Raises KeyError for one that `refresh`
        did not offer."""
        self._taken.update(uids)
        return self._pick(uids, [self._home[uid] for uid in uids], {k: s.encoded for k, s in self._segments.items()})

    def segments(self, uids: Iterable[Uid]) -> list[str]:
        """The key, below the run, of the segment that each taken uid lies in: for the step record."""
        return [self._home[uid] for uid in uids]

    def fetch(self, step: Step) -> list[Group]:
        """The batch that a step record consumed, as `take` gave it, read from the segments that it names.

        Raises Corrupt when one of them is gone or does not hold its group.
        """
        if len(step.segments) != len(step.trained):
            raise Corrupt(f"record {step.lsn}", f"{len(step.trained)} groups out of {len(step.segments)} segments")
        keys = sorted(set(step.segments))
        found = dict(zip(keys, self._pool.map(self._named, keys), strict=True))
        return self._pick([Uid.parse(text) for text in step.trained], step.segments, found)

    def history(self, newest: int) -> list[Group]:
        """The groups of the newest segments, settled ones too, oldest first: for reports. Lists every segment; what is
        deleted meanwhile is left out."""
        listed = (key.removeprefix(self._prefix) for key in self._store.keys(f"{self._prefix}groups/"))
        keys = [key for key in listed if _SEGMENT.fullmatch(key)][-newest:]
        bodies = self._pool.map(self._there, keys)
        return [group for body in bodies if body is not None for group in schema.decode(body)]

    @property
    def pending_bytes(self) -> int:
        """Encoded bytes of the segments in memory."""
        return sum(segment.encoded.size for segment in self._segments.values())

    # -- inside --------------------------------------------------------------------------------------

    def _offer(self, ledger: Ledger) -> list[Candidate]:
        """Choose the copy of every open attempt: the one taken, else the oldest version, a whole group before
        a tombstone; by key among equals, so that all readers choose alike."""
        copies = sorted(
            (c.version, c.uid, c.tombstone is not None, key, i)
            for key, segment in self._segments.items()
            for i, c in enumerate(segment.candidates)
            if ledger.is_open(c.uid)
        )
        home: dict[Uid, str] = {uid: self._home[uid] for uid in self._taken}
        offered = []
        for _, uid, _, key, i in copies:
            if home.setdefault(uid, key) == key:
                offered.append(self._segments[key].candidates[i])
        self._home = home
        return offered

    def _forget(self, ledger: Ledger, floor: int) -> None:
        for key in [key for key, version in self._seen.items() if version < floor]:
            del self._seen[key]
            self._segments.pop(key, None)
        for key in [k for k, s in self._segments.items() if all(_closed(ledger, c.uid) for c in s.candidates)]:
            del self._segments[key]
        self._taken = {uid for uid in self._taken if ledger.is_open(uid) and self._home[uid] in self._segments}

    def _there(self, key: str) -> bytes | None:
        try:
            return self._store.get(self._prefix + key)
        except NotFound:
            return None

    def _read_listed(self, key: str) -> _Segment | None:
        """A listed segment; None when it was deleted since: below a floor that our ledger does not know yet."""
        try:
            return self._read(key)
        except NotFound:
            return None

    def _read(self, key: str) -> _Segment:
        body = self._store.get(self._prefix + key)
        match = _SEGMENT.fullmatch(key)
        try:
            encoded = schema.Segment(body)
            candidates = encoded.candidates()
        except SchemaTooNew as error:
            raise SchemaTooNew(f"{key}: {error}") from error
        except (pa.ArrowException, KeyError) as error:
            raise Corrupt(key, f"not a segment: {error}") from error
        if match is None or any(c.version != int(match[1]) for c in candidates):
            raise Corrupt(key, "holds groups of another version than its key says")
        return _Segment(int(match[1]), encoded, candidates)

    def _named(self, key: str) -> schema.Segment:
        try:
            return schema.Segment(self._store.get(self._prefix + key))
        except NotFound as error:
            raise Corrupt(key, "missing, though a step record names it") from error

    def _pick(self, uids: Sequence[Uid], keys: Sequence[str], there: Mapping[str, schema.Segment]) -> list[Group]:
        """Group i out of segment i; every segment is decoded once, and of it only what is wanted."""
        wanted: dict[str, set[Uid]] = {}
        for uid, key in zip(uids, keys, strict=True):
            wanted.setdefault(key, set()).add(uid)
        found: dict[tuple[str, Uid], Group] = {}
        decoded = self._pool.map(lambda key: there[key].groups(wanted[key], told=False), wanted)
        for key, groups in zip(wanted, decoded, strict=True):
            found |= {(key, group.uid): group for group in groups}
        missing = [f"{uid} in {key}" for uid, key in zip(uids, keys, strict=True) if (key, uid) not in found]
        if missing:
            raise Corrupt(missing[0], "no such group")
        return [found[key, uid] for uid, key in zip(uids, keys, strict=True)]


def _closed(ledger: Ledger, uid: Uid) -> bool:
    """Whether the attempt can never be open again, for a ledger that may be behind the one of the producer."""
    granted = ledger.open_attempt(uid.ordinal)
    return granted is None or uid.attempt < granted
