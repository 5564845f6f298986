"""The audit of a run: reads its store, and nothing else, and says what is wrong.

    log/ -> every record, in order -> the account (`rl.account`) and, of each step, its samples and its state

Invariants
- It decides nothing by the code that it checks: no ledger, no selection, no cached state of another process; who was
  trained, how old a sample was and what a snapshot must say comes from the records and from the samples' own tokens.
- It reads every byte that a record names, and holds it against its checksum. What may be deleted by now (below the
  floor of garbage collection, or by an operator's mark) may be missing, never wrong.
- It writes nothing, and may run beside a living run.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
from pydantic import ValidationError

from infra.store import schema
from infra.store.directories import fetch_part, read_manifest
from infra.store.errors import Corrupt, NotFound, SchemaTooNew
from infra.store.objects import ObjectStore
from rl import records
from rl.account import Account, Finding, Kind
from rl.records import Record, Step
from rl.trajectory import Group, Uid

KEPT = 256
"""Segments in memory at once; the groups of one are trained by neighbouring steps."""
_RECORD = re.compile(r"log/(\d{10})\.json$")
_VERSION = re.compile(r"groups/(\d{10})/")


@dataclass(frozen=True)
class Audit:
    """What was found. `account` holds the figures: who was trained, dropped, or is open."""

    account: Account
    segments: int
    """Sample segments read."""
    states: int
    """Checkpoints read, every file of them."""

    @property
    def findings(self) -> list[Finding]:
        return self.account.findings

    def count(self, kind: Kind) -> int:
        return sum(finding.kind is kind for finding in self.findings)


def audit(store: ObjectStore, prefix: str, acknowledged: Mapping[str, str] | None = None) -> Audit:
    """Audit the run under `prefix` (with its closing slash). Raises only what a store that can not be reached raises.

    `acknowledged` is what its writers were told to be there, whoever kept that: key, as in the bucket, -> nonce.
    """
    return _Auditor(store, prefix).run(acknowledged or {})


class _Auditor:
    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._account = Account()
        self._segments: dict[str, dict[Uid, Group]] = {}
        self._read = self._states = 0

    def run(self, acknowledged: Mapping[str, str]) -> Audit:
        log = list(self._records())
        for record in log:
            self._account.note(record)
        past = Account()  # as it was before each step: its findings are those of the whole account, told once
        for record in log:
            if isinstance(record, Step):
                self._samples(past, record)
                self._state(record)
            past.note(record)
        for key, nonce in acknowledged.items():
            self._acknowledged(key, nonce)
        return Audit(self._account, self._read, self._states)

    # -- the log -------------------------------------------------------------------------------------

    def _records(self) -> Iterator[Record]:
        listed = (_RECORD.search(key) for key in self._store.keys(f"{self._prefix}log/"))
        found = {int(match[1]) for match in listed if match}
        for lsn in range(1, max(found, default=0) + 1):
            record = self._record(lsn)
            if record is not None:
                yield record
            elif lsn not in found:
                self._account.say(Kind.LOST, f"record {lsn} is missing, though later ones exist")

    def _record(self, lsn: int) -> Record | None:
        key = self._key(lsn)
        try:
            record = records.decode(self._store.get(self._prefix + key))
        except NotFound:
            return None
        except ValidationError:
            self._account.say(Kind.UNREADABLE, f"{key} is not a record")
            return None
        if record.lsn != lsn:
            self._account.say(Kind.UNREADABLE, f"{key} holds record {record.lsn}")
            return None
        return record

    @staticmethod
    def _key(lsn: int) -> str:
        return f"log/{lsn:010d}.json"

    def _may_be_gone(self, version: int, sample: bool) -> bool:
        """Whether objects of a version may be deleted by now, also by a record that is newer than our reading."""
        account = self._account
        while not (version < account.floor if sample else account.may_be_gone(version)):
            record = self._record(account.lsn + 1)
            if record is None:
                return False
            account.note(record)
        return True

    # -- samples -------------------------------------------------------------------------------------

    def _samples(self, past: Account, step: Step) -> None:
        """Every trained group, by its own tokens, at the moment before the step."""
        if len(step.segments) != len(step.trained):
            self._unreadable(f"record {step.lsn} names {len(step.segments)} segments for {len(step.trained)} groups")
        for text, key in zip(step.trained, step.segments, strict=False):
            group = self._group(step, Uid.parse(text), key)
            if group is None:
                continue
            starts = {member.start_version for member in group.members}
            sampled = {v for m in group.members for v, mask in zip(m.versions, m.loss_mask, strict=True) if mask}
            for version in sorted(starts | sampled):
                lag = past.lag(version)
                if lag is None or lag > step.alpha:
                    how = "not on the live line" if lag is None else f"{lag} steps old, above alpha ({step.alpha})"
                    self._account.say(Kind.STALE, f"record {step.lsn}: group {text} is of version {version}: {how}")

    def _group(self, step: Step, uid: Uid, key: str) -> Group | None:
        """What a step trained; None when it can not be looked at, which was told unless it may be so."""
        groups = self._segment(key)
        if groups is None:
            return None
        group = groups.get(uid)
        if group is None or not group.members:
            self._unreadable(f"{key} holds no group {uid}, which record {step.lsn} trained")
            return None
        return group

    def _segment(self, key: str) -> dict[Uid, Group] | None:
        if key in self._segments:
            return self._segments[key]
        match = _VERSION.match(key)
        if match is None:
            self._unreadable(f"{key} is not the name of a segment")
            return None
        try:
            body = self._store.get(self._prefix + key)
            # the nonce of a segment is the hash of its content, see `SampleBuffer.seal`
            if self._store.nonce(self._prefix + key) != hashlib.sha256(body).hexdigest():
                self._unreadable(f"{key} is not what was written")
            groups = {group.uid: group for group in schema.decode(body)}
        except NotFound:
            if not self._may_be_gone(int(match[1]), sample=True):
                self._unreadable(f"{key} is missing, though a step names it")
            return None
        except (SchemaTooNew, pa.ArrowException, KeyError) as error:
            self._unreadable(f"{key} is not a segment: {error}")
            return None
        self._read += 1
        if len(self._segments) == KEPT:
            del self._segments[next(iter(self._segments))]
        self._segments[key] = groups
        return groups

    # -- states --------------------------------------------------------------------------------------

    def _state(self, step: Step) -> None:
        """Manifest and files of a version, byte by byte."""
        prefix = self._prefix + step.state.prefix
        try:
            _, manifest = read_manifest(self._store, prefix, step.state.manifest_sha256)
            for name in manifest.files:
                parts = manifest.parts(name)
                for part in parts:
                    fetch_part(self._store, prefix + name, part, whole=len(parts) == 1)
        except (NotFound, Corrupt) as error:
            if isinstance(error, Corrupt) or not self._may_be_gone(step.version, sample=False):
                self._unreadable(f"version {step.version}: {error}")
            return
        self._states += 1

    # -- promises ------------------------------------------------------------------------------------

    def _acknowledged(self, key: str, nonce: str) -> None:
        try:
            found = self._store.nonce(key)
        except NotFound:
            match = _VERSION.match(key.removeprefix(self._prefix))
            if match is None or not self._may_be_gone(int(match[1]), sample=True):
                self._account.say(Kind.LOST, f"{key} was acknowledged and is missing")
            return
        if found != nonce:
            self._account.say(Kind.LOST, f"{key} was acknowledged to one writer and holds the object of another")

    def _unreadable(self, what: str) -> None:
        self._account.say(Kind.UNREADABLE, what)
