"""Going back: what a rollback makes of the ledger.

Invariants
- Version numbers and attempts are never used again; the gc floor, pins and deletions stay what they are.
- What was trained after the version is outstanding again, as a fresh attempt; what was abandoned stays abandoned.
- A version is gone back to only if it can be resumed: its full state was not deleted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rl.errors import LogCorrupt
from rl.ledger import Ledger
from rl.records import Outcome, Record, Rollback, Settle, Snapshot, Step
from rl.trajectory import Uid


def live_line(steps: Sequence[Step], records: Iterable[Record]) -> list[Step]:
    """The steps of the live line after more records."""
    line = list(steps)
    for record in records:
        if isinstance(record, Step):
            line.append(record)
        elif isinstance(record, Rollback):
            line = [step for step in line if step.version <= record.to]
    return line


def rolled_back(records: Iterable[Record], to: int) -> Snapshot:
    """The snapshot that a rollback to version `to` carries: settled is what the live line up to `to` settled;
    every later attempt is closed for good, so its ordinal, if trained after `to`, is granted a fresh one.

    `records` is the log from its beginning (or from a record with a snapshot no newer than `to`).
    Raises LogCorrupt when `to` is not on the live line.
    """
    ledger = Ledger()
    then: Snapshot | None = None
    live: list[int] = []
    reopened: dict[int, int] = {}
    for record in records:
        if ledger.lsn == 0 and record.lsn > 1:
            if record.snapshot is None:
                raise LogCorrupt(f"record {record.lsn} does not start a fold")
            ledger = Ledger.from_snapshot(record.lsn, record.snapshot)
            live = list(ledger.line)
        else:
            ledger.apply(record)
        if isinstance(record, Step):
            live.append(record.version)
        elif isinstance(record, Rollback):
            known = record.to in live  # else the fold began after it
            live = live[: live.index(record.to) + 1] if known else list(ledger.line)
        if ledger.head == to:
            then = ledger.snapshot()
            reopened.clear()
            continue
        if isinstance(record, Step):
            reopened.update((uid.ordinal, uid.attempt + 1) for uid in map(Uid.parse, record.trained))
        if isinstance(
            record, Step | Settle
        ):  # what an earlier rollback reopened may have been abandoned since
            for drop in record.dropped:
                if drop.outcome is Outcome.ABANDON:
                    reopened.pop(Uid.parse(drop.uid).ordinal, None)
    if then is None or to not in live:
        raise LogCorrupt(f"version {to} is not on the live line {live}")
    if to in ledger.deleted:
        raise LogCorrupt(f"version {to} was deleted by its operator")
    if to < ledger.gc_floor:
        raise LogCorrupt(f"version {to} is below the gc floor {ledger.gc_floor}: its state may be deleted")
    after = Ledger.from_snapshot(ledger.lsn, then)
    for ordinal, attempt in ledger.attempts.items():
        if not after.settled(ordinal):
            after.attempts[ordinal] = max(attempt, after.attempts.get(ordinal, 0))
    for ordinal, attempt in reopened.items():
        after.attempts[ordinal] = max(attempt, after.attempts.get(ordinal, 0))
    after.granted = dict.fromkeys(after.attempts, to)
    for ordinal in _settled_without_training(ledger, after, reopened):
        after.settle(ordinal)
    after.next_version = ledger.next_version
    after.fence, after.gc_floor = ledger.fence, ledger.gc_floor
    after.pins, after.deleted = dict(ledger.pins), set(ledger.deleted)
    after.states = {v: state for v, state in after.states.items() if v not in ledger.deleted}
    after.dropped_groups = Counter(ledger.dropped_groups)
    resume = after.newest_full
    if resume is None or min(resume, after.oldest_needed if resume != to else resume) < after.gc_floor:
        raise LogCorrupt(f"version {to} can not be resumed: what it builds on may be deleted; see rollmill versions")
    return after.snapshot()


def _settled_without_training(now: Ledger, then: Ledger, reopened: dict[int, int]) -> list[int]:
    """Ordinals abandoned after `then`: they stay abandoned, for their attempts are closed."""
    top = max(now.settled_above, default=now.low_water)
    return [
        o
        for o in range(then.low_water, top + 1)
        if now.settled(o) and not then.settled(o) and o not in reopened
    ]
