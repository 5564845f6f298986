"""The one way to append to the commit log. Creating the object `log/{lsn}.json`, if absent, is the commit.

Invariants
- A writer applies a record to a copy of its ledger before it creates the object: what breaks a rule of the
  ledger is never written. What is written can be read back, or is not written either.
- Only the holder of the newest fence commits steps. Two writers collide on the lsn, and one that learns of a
  newer fence, in whichever way, raises Fenced from then on: so after a fence no record of an older holder can
  come to be.
- A holder whose step or rollback may or may not have been written (the store never answered) has lost its fence, for
  what it holds in memory may not be the head: only a new fence tells.
- Every 16th version and every fence carry the snapshot that holds *after* them; head.json follows.

An instance belongs to one thread. A writer's name is its own: make it unique per process.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from infra.store.errors import Overtaken, StoreError
from infra.store.objects import ObjectStore
from infra.store.reader import LogReader
from rl import records
from rl.errors import DeadlineExceeded, Fenced, LogCorrupt, ProtocolViolation
from rl.ledger import Ledger
from rl.records import Drop, Fence, GcFloor, Mark, Record, Retain, Rollback, Settle, StateRef, Step
from rl.rollback import rolled_back
from rl.trajectory import Uid

R = TypeVar("R", Fence, Step, Settle, Rollback, GcFloor, Retain)

log = logging.getLogger(__name__)

SNAPSHOT_EVERY = 16
"""Versions between two step records that carry a snapshot."""
FENCE_DEADLINE_S = 60.0


class CommitLog(LogReader):
    """One run's log, with the right to append."""

    def __init__(self, store: ObjectStore, prefix: str, writer: str):
        super().__init__(store, prefix)
        self.writer = writer
        self._held: int | None = None
        self._doubtful: int | None = None
        """Record of ours of which the store never said whether it was written."""
        self._read_once = False

    def sync(self) -> Ledger:
        """Read what is new. Raises Fenced when that takes our fence away, LogCorrupt, or a StoreError."""
        super().sync()
        self._read_once = True
        self._check_held()
        return self.ledger

    # -- writing -------------------------------------------------------------------------------------

    def fence(self) -> int:
        """Take the run over from whoever has it; returns the fence number. Of racing fences the last one holds.

        Raises DeadlineExceeded when others keep winning the next record.
        """
        self._held = self._doubtful = None
        end = time.monotonic() + FENCE_DEADLINE_S
        while time.monotonic() < end:
            self.sync()
            fence = Fence(**self._stamp())
            if self._create(fence, with_snapshot=True):
                self._held = fence.lsn
                return fence.lsn
        raise DeadlineExceeded(f"no fence could be created in {FENCE_DEADLINE_S:.0f} s: other writers keep winning")

    def state_prefix(self) -> str:
        """A fresh key prefix, below the run, for the state of the coming step: `state/{lsn}-{nonce}/`. Ask for the
        next one only when that step is committed: a later step, or a fence, says that a prefix which no record names
        will never be named (see `infra.store.gc`)."""
        return f"state/{self.ledger.lsn + 1:010d}-{uuid.uuid4().hex[:8]}/"

    def append_step(
        self,
        *,
        state: StateRef,
        weights_sha256: str,
        alpha: int,
        trained: Sequence[Uid] = (),
        segments: Sequence[str] = (),
        dropped: Sequence[Drop] = (),
        metrics: Mapping[str, float] | None = None,
    ) -> Step:
        """Commit the next version on the head: publish `state`, consume `trained` (in batch order, each read
        from its place in `segments`, see `SampleBuffer.segments`) and `dropped`. `state` must be complete.

        Raises Fenced, Overtaken, ProtocolViolation without a fence, LogCorrupt when a uid is not open.
        """
        if self._held is None:
            raise ProtocolViolation("a step is committed by the holder of a fence: call fence() first")
        if len(segments) != len(trained):
            raise ValueError(f"{len(trained)} trained groups out of {len(segments)} segments: name one for each")
        return self._append(
            lambda stamp: Step(
                **stamp,
                version=self.ledger.next_version,
                base=self.ledger.head,
                state=state,
                weights_sha256=weights_sha256,
                alpha=alpha,
                trained=tuple(str(uid) for uid in trained),
                segments=tuple(segments),
                dropped=tuple(dropped),
                metrics=dict(metrics or {}),
            )
        )

    def append_settle(self, dropped: Sequence[Drop]) -> Settle:
        """Drop attempts between steps. Raises as `append_step`; an operator may do it without a fence."""
        return self._append(lambda stamp: Settle(**stamp, dropped=tuple(dropped)))

    def append_rollback(self, to: int) -> Rollback:
        """Make `to` the head again. Call it as the holder of a fence. Raises LogCorrupt unless `to` is live."""
        if self._held is None:
            raise ProtocolViolation("a rollback is made by the holder of a fence: call fence() first")
        return self._append(lambda stamp: Rollback(**stamp, to=to, snapshot=rolled_back(self.records(), to)))

    def append_gc_floor(self, version: int) -> GcFloor:
        """Allow deletion below `version`. Raises LogCorrupt when that would lower the floor."""
        return self._append(lambda stamp: GcFloor(**stamp, version=version))

    def append_retain(self, version: int, mark: Mark, state: StateRef | None = None) -> Retain:
        """Pin, unpin or delete a version; a pin names its `state`. Needs no fence: an operator does it beside the
        trainer. Raises LogCorrupt, with the reason, for what may not be pinned or deleted."""
        return self._append(lambda stamp: Retain(**stamp, version=version, mark=mark, state=state))

    # -- inside --------------------------------------------------------------------------------------

    def _append(self, make: Callable[[dict], R]) -> R:
        """Create `make(stamp)` at the next free lsn, as long as what others put there leaves it valid."""
        if not self._read_once:  # else the caller's view is what the ledger says, and must not move unnoticed
            self.sync()
        overtaken: Record | None = None
        while True:
            self._check_held()
            record = make(self._stamp())
            snapshot = isinstance(record, Step) and record.version % SNAPSHOT_EVERY == 0
            try:
                if self._create(record, with_snapshot=snapshot):
                    return record
            except LogCorrupt as error:
                if overtaken is None:
                    raise
                raise Overtaken(f"record {overtaken.lsn} by {overtaken.writer} came first: {error}") from error
            except StoreError:
                if isinstance(record, Step | Rollback):
                    self._doubtful = record.lsn
                raise
            overtaken = self.read(record.lsn)
            if overtaken is None:
                raise LogCorrupt(f"{self._key(record.lsn)}: exists and can not be read")
            if self._held is not None and not isinstance(overtaken, Settle | GcFloor | Retain):
                raise Fenced(f"{overtaken.kind} record {overtaken.lsn} by {overtaken.writer} took the place of ours")
            self.ledger.apply(overtaken)

    def _create(self, record: R, with_snapshot: bool) -> bool:
        """Create the record and fold it; False when the lsn is taken. Raises LogCorrupt, before anything is
        written, when the record breaks a rule."""
        after = Ledger.from_snapshot(self.ledger.lsn, self.ledger.snapshot())
        after.apply(record)
        if with_snapshot:
            record = record.model_copy(update={"snapshot": after.snapshot()})
        body = records.encode(record)
        records.decode(body)
        if not self.store.create(self._key(record.lsn), body, record.nonce):
            return False
        self.ledger.apply(record)
        if record.snapshot is not None:
            try:
                self.store.put(self._prefix + "head.json", json.dumps({"lsn": record.lsn}).encode())
            except StoreError as error:  # only a hint; the commit stands
                log.warning("head.json not written: %s", error)
        return True

    def _check_held(self) -> None:
        if self._doubtful is not None:
            raise Fenced(f"whether record {self._doubtful} of ours was written is not known: start again, from a fence")
        if self._held is not None and self.ledger.fence != self._held:
            raise Fenced(f"fence {self.ledger.fence} is newer than ours, {self._held}: another trainer took over")

    def _stamp(self) -> dict:
        """What every record has; a fresh nonce, since each lsn tried is a create of its own."""
        return {
            "lsn": self.ledger.lsn + 1,
            "nonce": uuid.uuid4().hex,
            "writer": self.writer,
            "time": time.time(),
        }
