"""A second, independent account of a run, written from the design's words and not from `rl.ledger`.

It keeps the fate of every attempt ever closed and the parent of every version; the state machine and the
liveness runs hold the ledger against it after every record. `World` is the store: a list of encoded records and
a list of sealed groups, both of which outlive every crash.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl.errors import Fenced
from rl.ledger import LINE, Ledger
from rl.records import Outcome, Record, Rollback, Settle, StateRef, Step, decode, encode
from rl.selection import Candidate
from rl.staleness import StalenessPolicy
from rl.trajectory import Uid


class Account:
    """Who was trained, dropped or is open, kept by attempt."""

    def __init__(self, alpha: int) -> None:
        self.alpha = alpha
        self.fates: dict[Uid, str] = {}
        self.trained: dict[int, tuple[Uid, int]] = {}
        self.abandoned: dict[int, str] = {}
        self.granted: dict[int, int] = {}
        self.parent: dict[int, int | None] = {}
        self.head: int | None = None

    def line(self, head: int | None) -> list[int]:
        """The versions from the first to `head`, by their parents."""
        line: list[int] = []
        while head is not None:
            line.append(head)
            head = self.parent[head]
        return line[::-1]

    def record(self, record: Record, batch: list[Candidate]) -> None:
        """Note one record. `batch` are the sealed groups that a step trained, in its order."""
        if isinstance(record, Step):
            line = self.line(self.head)
            assert record.version > max(self.parent, default=-1), "a version was used twice"
            assert record.base == self.head, "a step on something else than the head"
            assert [str(c.uid) for c in batch] == list(record.trained)
            for c in batch:
                assert c.tombstone is None, "a group without members was trained"
                assert c.version in line and (c.newest is None or c.newest in line), "an abandoned version was trained"
                assert len(line) - 1 - line.index(c.version) <= self.alpha, "trained past alpha"
                self._close(c.uid, "trained")
                self.trained[c.uid.ordinal] = (c.uid, record.version)
            self.parent[record.version] = record.base
            self.head = record.version
        if isinstance(record, Step | Settle):
            for drop in record.dropped:
                uid = Uid.parse(drop.uid)
                self._close(uid, drop.reason.value)
                if drop.outcome is Outcome.ABANDON:
                    self.abandoned[uid.ordinal] = drop.reason.value
                else:
                    self.granted[uid.ordinal] = uid.attempt + 1
        if isinstance(record, Rollback):
            self.head = record.to
            live = set(self.line(record.to))
            for ordinal, (uid, version) in list(self.trained.items()):
                if version not in live:
                    del self.trained[ordinal]
                    self.granted[ordinal] = uid.attempt + 1

    def _close(self, uid: Uid, fate: str) -> None:
        assert uid not in self.fates, f"{uid} is closed twice: {self.fates[uid]}, then {fate}"
        assert self.is_open(uid), f"{uid} was never granted"
        self.fates[uid] = fate

    def settled(self, ordinal: int) -> bool:
        return ordinal in self.trained or ordinal in self.abandoned

    def is_open(self, uid: Uid) -> bool:
        return not self.settled(uid.ordinal) and self.granted.get(uid.ordinal, 0) == uid.attempt

    def compare(self, ledger: Ledger) -> None:
        """Conservation: every ordinal and every attempt is in exactly one place, and in the same one in both."""
        assert not self.trained.keys() & self.abandoned.keys()
        closed: dict[int, set[int]] = {}
        for uid in self.fates:
            closed.setdefault(uid.ordinal, set()).add(uid.attempt)
        top = max(closed, default=0) + 2
        for ordinal in range(top + 1):
            granted = self.granted.get(ordinal, 0)
            open_attempt = None if self.settled(ordinal) else granted
            assert ledger.settled(ordinal) == self.settled(ordinal), ordinal
            assert ledger.open_attempt(ordinal) == open_attempt, ordinal
            attempts = range(granted if open_attempt is not None else granted + 1)
            assert closed.get(ordinal, set()) == set(attempts), ordinal
        dropped = [fate for fate in self.fates.values() if fate != "trained"]
        assert sum(ledger.dropped_groups.values()) == len(dropped)
        assert all(ledger.dropped_groups[reason] == dropped.count(reason) for reason in set(dropped))
        assert ledger.trained_groups == len(self.trained)
        assert ledger.head == self.head
        assert ledger.line == self.line(self.head)[-LINE:]
        assert ledger.next_version == max(self.parent, default=-1) + 1


class World:
    """What is durable: the log and the sealed groups. Every append is accounted for and checked."""

    def __init__(self, policy: StalenessPolicy, snapshot_every: int) -> None:
        self.policy = policy
        self.snapshot_every = snapshot_every
        self.log: list[bytes] = []
        self.sealed: list[Candidate] = []
        self.account = Account(policy.alpha)
        self.serving = 0
        self.flying: dict[Uid, int] = {}
        """What the rollout side told last of what it has in flight; it may be long outdated."""

    def append(self, ledger: Ledger, make: Callable[..., Record], batch: list[Candidate] = (), **fields: Any) -> None:  # type: ignore[assignment]
        """Create the record after those that `ledger` has folded. Raises Fenced when that one exists."""
        lsn = ledger.lsn + 1
        if lsn <= len(self.log):
            raise Fenced(f"record {lsn} exists")
        record = make(lsn=lsn, nonce=str(lsn), writer="t", time=0.0, **fields)
        after = Ledger() if lsn == 1 else Ledger.from_snapshot(ledger.lsn, ledger.snapshot())
        after.apply(record)
        if record.snapshot is None and lsn % self.snapshot_every == 0:
            record = record.model_copy(update={"snapshot": after.snapshot()})
        ledger.apply(record)
        body = encode(record)
        assert decode(body) == record
        self.log.append(body)
        self.account.record(record, list(batch))
        self.account.compare(ledger)
        assert vars(Ledger.from_snapshot(lsn, ledger.snapshot())) == vars(ledger)

    def step(self, ledger: Ledger, batch: list[Candidate], dropped: list[Any]) -> None:
        """Commit the next version, trained on `batch`."""
        self.append(ledger, Step, batch=batch, **self.step_fields(ledger, batch, dropped))

    def step_fields(self, ledger: Ledger, batch: list[Candidate], dropped: list[Any]) -> dict[str, Any]:
        """What the record of the next version says."""
        version = ledger.next_version
        return {
            "version": version,
            "base": ledger.head,
            "state": self.state(version),
            "weights_sha256": "0",
            "alpha": self.policy.alpha,
            "trained": tuple(str(c.uid) for c in batch),
            "dropped": tuple(dropped),
        }

    @staticmethod
    def full(version: int) -> bool:
        """Whether this world keeps the full state of a version."""
        return version % 3 == 0

    def state(self, version: int) -> StateRef:
        return StateRef(prefix=f"state/{version}/", manifest_sha256="0", full=self.full(version))

    def starts(self) -> list[int]:
        """Lsns at which a fold may begin: 0, and every record with a snapshot."""
        return [0] + [at for at, body in enumerate(self.log, 1) if decode(body).snapshot is not None]

    def fold(self, start: int) -> Ledger:
        """A ledger rebuilt from the log alone, from the record `start` (0: from the beginning)."""
        ledger = Ledger()
        if start:
            snapshot = decode(self.log[start - 1]).snapshot
            assert snapshot is not None
            ledger = Ledger.from_snapshot(start, snapshot)
        self.follow(ledger)
        return ledger

    def follow(self, ledger: Ledger) -> None:
        """Fold what was appended since."""
        for body in self.log[ledger.lsn :]:
            ledger.apply(decode(body))

    def visible(self, ledger: Ledger) -> list[Candidate]:
        """What a reader that lists from the policy's floor sees."""
        floor = self.policy.floor(ledger)
        return [c for c in self.sealed if c.version >= floor]

    def unsettled(self, in_flight: dict[Uid, Any]) -> int:
        """Groups that may still be trained, by the account: in flight, or sealed and within the bound."""
        line = self.account.line(self.account.head)
        window = set(line[max(0, len(line) - 1 - self.policy.alpha) :])
        copies: dict[Uid, Candidate] = {}
        for c in sorted(self.sealed, key=lambda c: (c.version, c.tombstone is not None)):
            if self.account.is_open(c.uid) and c.version >= min(window):
                copies.setdefault(c.uid, c)
        eligible = {
            c.uid
            for c in copies.values()
            if c.tombstone is None and c.version in window and (c.newest is None or c.newest in line)
        }
        busy = {uid for uid in in_flight if self.account.is_open(uid)} - copies.keys()
        return len(eligible) + len(busy)
