"""Selecting a batch, and admitting new work: both pure functions of the ledger and what is sealed.

Invariants
- At most one group per ordinal is selected; only open attempts are; FIFO, oldest version first.
- Of several sealed copies of one attempt all functions here look at the same one.
- What is dropped is dropped by name, and every drop says what becomes of the ordinal.
- A group without signal (equal rewards) is dropped only together with a batch, or when so many were looked
  at that none can form: a poll that finds too little changes nothing.
- Admission draws, in stream order, what is neither settled nor sealed nor in flight: it owns no cursor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from rl.ledger import Ledger
from rl.records import Drop, Outcome, Reason
from rl.staleness import StalenessPolicy
from rl.trajectory import Group, Uid


@dataclass(frozen=True, slots=True)
class Candidate:
    """What selection needs to know of a sealed group."""

    uid: Uid
    version: int
    informative: bool
    tombstone: str | None = None
    newest: int | None = None
    """Newest version that produced a token of it; None when that is `version`."""

    @classmethod
    def of(cls, group: Group) -> Candidate:
        newest = max((max(member.versions) for member in group.members), default=group.version)
        later = newest if newest > group.version else None
        return cls(group.uid, group.version, group.informative, group.tombstone, later)

    def rolled_back(self, ledger: Ledger) -> bool:
        """Whether any of its tokens comes from a version that is no longer on the live line."""
        return ledger.lag(self.version) is None or (self.newest is not None and ledger.lag(self.newest) is None)


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
        strikes: Mapping[str, int] = ledger.strikes.get(uid.ordinal, {})
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
    candidates = list(candidates)
    judged = _judged(ledger, candidates)
    result = Selection(duplicates=len(candidates) - len(judged))
    equal: list[Drop] = []
    batch: list[Candidate] = []
    for c in judged:
        if c.tombstone is not None:
            result.dropped.append(drops.drop(ledger, c.uid, Reason(c.tombstone)))
        elif c.rolled_back(ledger):
            result.dropped.append(drops.drop(ledger, c.uid, Reason.ROLLED_BACK))
        elif not staleness.viable(ledger.lag(c.version)):
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
    """Sealed groups that the coming step itself puts out of the window: they are dropped in its own record,
    so that their problems are granted a fresh attempt in the same instant, and none is lost from sight.

    `taken` are the uids that the record settles already, trained *and* dropped."""
    late = []
    for c in _judged(ledger, candidates):
        if c.uid in taken:
            continue
        lag = ledger.lag(c.version)
        if c.tombstone is not None:
            late.append(drops.drop(ledger, c.uid, Reason(c.tombstone)))
        elif c.rolled_back(ledger):
            late.append(drops.drop(ledger, c.uid, Reason.ROLLED_BACK))
        elif lag is not None and not staleness.viable(lag + 1):
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
    judged = _judged(ledger, sealed)
    present = {c.uid for c in judged}
    waiting = sum(
        c.tombstone is None and not c.rolled_back(ledger) and staleness.viable(ledger.lag(c.version)) for c in judged
    )
    busy = {uid for uid in in_flight if ledger.is_open(uid)} - present
    room = staleness.capacity(ledger.head, behind) - waiting - len(busy)
    fresh = (uid for uid in ledger.outstanding() if uid not in present and uid not in busy)
    return list(islice(fresh, max(0, room)))


def _judged(ledger: Ledger, candidates: Iterable[Candidate]) -> list[Candidate]:
    """One sealed copy of every open attempt, oldest version first; of copies of one version a whole group
    rather than a tombstone."""
    copies: dict[Uid, Candidate] = {}
    for c in sorted(candidates, key=lambda c: (c.version, c.uid, c.tombstone is not None)):
        if ledger.is_open(c.uid):
            copies.setdefault(c.uid, c)
    return list(copies.values())
