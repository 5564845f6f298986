"""Selecting a batch, and admitting new work: both pure functions of the ledger and what is sealed.

Invariants
- At most one group per ordinal is selected; only open attempts are; FIFO, oldest version first.
- What is dropped is dropped by name, and every drop says what becomes of the ordinal.
- A group without signal (equal rewards) is dropped only together with a batch, or when so many were looked
  at that none can form: a poll that finds too little changes nothing.
- Admission draws, in stream order, what is neither settled nor sealed nor in flight: it owns no cursor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice

from rl.ledger import Ledger
from rl.records import Drop, Outcome, Reason
from rl.staleness import StalenessPolicy
from rl.trajectory import Uid


@dataclass(frozen=True, slots=True)
class Candidate:
    """What selection needs to know of a sealed group."""

    uid: Uid
    version: int
    informative: bool
    tombstone: str | None = None


@dataclass
class Selection:
    """`batch` is empty until a whole one can be formed; `dropped` is to be written with the next record."""

    batch: list[Candidate] = field(default_factory=list)
    dropped: list[Drop] = field(default_factory=list)
    duplicates: int = 0


@dataclass(frozen=True)
class DropPolicy:
    """How many dropped attempts an ordinal may have before it is abandoned."""

    stale_attempts: int = 3
    failed_attempts: int = 3
    train_equal_rewards: bool = False

    def drop(self, ledger: Ledger, uid: Uid, reason: Reason) -> Drop:
        """The drop of an open attempt for `reason`, by the budget of its ordinal."""
        strikes = ledger.strikes.get(uid.ordinal, {})
        if reason is Reason.EQUAL_REWARD:
            outcome = Outcome.ABANDON
        elif reason in (Reason.STALE, Reason.ROLLED_BACK, Reason.DUPLICATE):
            spent = strikes.get(Reason.STALE.value, 0) + 1 >= self.stale_attempts
            outcome = Outcome.ABANDON if reason is Reason.STALE and spent else Outcome.RETRY
        else:
            failed = sum(n for name, n in strikes.items() if name not in (Reason.STALE, Reason.ROLLED_BACK))
            outcome = Outcome.ABANDON if failed + 1 >= self.failed_attempts else Outcome.RETRY
        return Drop(uid=str(uid), reason=reason, outcome=outcome)


def select(ledger: Ledger, candidates: Iterable[Candidate], staleness: StalenessPolicy, drops: DropPolicy) -> Selection:
    """The next batch out of the sealed groups, for the step whose base is the ledger's head."""
    result = Selection()
    seen: set[int] = set()
    equal: list[Drop] = []
    batch: list[Candidate] = []
    for c in sorted(candidates, key=lambda c: (c.version, c.uid)):
        if not ledger.is_open(c.uid) or c.uid.ordinal in seen:
            result.duplicates += 1
            continue
        seen.add(c.uid.ordinal)
        lag = ledger.lag(c.version)
        if c.tombstone is not None:
            result.dropped.append(drops.drop(ledger, c.uid, Reason(c.tombstone)))
        elif lag is None:
            result.dropped.append(drops.drop(ledger, c.uid, Reason.ROLLED_BACK))
        elif not staleness.viable(lag):
            result.dropped.append(drops.drop(ledger, c.uid, Reason.STALE))
        elif len(batch) == staleness.groups_per_step or len(batch) + len(equal) == staleness.examined_per_step:
            continue
        elif c.informative or drops.train_equal_rewards:
            batch.append(c)
        else:
            equal.append(drops.drop(ledger, c.uid, Reason.EQUAL_REWARD))
    if len(batch) == staleness.groups_per_step or len(batch) + len(equal) == staleness.examined_per_step:
        result.batch = batch
        result.dropped += equal
    return result


def doomed(
    ledger: Ledger,
    candidates: Iterable[Candidate],
    taken: Collection[Uid],
    staleness: StalenessPolicy,
    drops: DropPolicy,
) -> list[Drop]:
    """Sealed groups, not in `taken`, that the coming step itself makes too old: they are dropped in its own
    record, so that their problems are granted a fresh attempt in the same instant."""
    seen: set[int] = {uid.ordinal for uid in taken}
    late = []
    for c in sorted(candidates, key=lambda c: (c.version, c.uid)):
        if c.tombstone is None and ledger.is_open(c.uid) and c.uid.ordinal not in seen:
            seen.add(c.uid.ordinal)
            lag = ledger.lag(c.version)
            if lag is not None and lag + 1 > staleness.alpha:
                late.append(drops.drop(ledger, c.uid, Reason.STALE))
    return late


def admissible(
    ledger: Ledger,
    serving: int,
    sealed: Iterable[Candidate],
    in_flight: Collection[Uid],
    staleness: StalenessPolicy,
) -> list[Uid]:
    """The attempts to start now, in stream order. Empty before the first version exists, or when the engines
    serve a version that was rolled back."""
    if ledger.head is None:
        return []
    behind = ledger.lag(serving)
    if behind is None:
        return []
    present: set[Uid] = set()
    waiting = 0
    for c in sealed:
        if c.uid in present or not ledger.is_open(c.uid):
            continue
        present.add(c.uid)
        waiting += c.tombstone is None and staleness.viable(ledger.lag(c.version))
    busy = {uid for uid in in_flight if ledger.is_open(uid)} - present
    room = staleness.capacity(ledger.head, behind) - waiting - len(busy)
    fresh = (uid for uid in ledger.outstanding() if uid not in present and uid not in busy)
    return list(islice(fresh, max(0, room)))
