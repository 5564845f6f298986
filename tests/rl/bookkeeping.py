"""What is durable in the state machine and the liveness runs: `World`, a list of encoded records and a list of sealed
groups, both of which outlive every crash.

Invariant: after every record the ledger agrees with the audit's own account (`rl.account`) in all that a snapshot
tells, and what a step trains is within the bound by that account.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl.account import Account
from rl.errors import Fenced
from rl.ledger import Ledger
from rl.records import Record, StateRef, Step, decode, encode
from rl.selection import Candidate
from rl.staleness import StalenessPolicy
from rl.trajectory import Uid


class World:
    """What is durable: the log and the sealed groups. Every append is accounted for and checked."""

    def __init__(self, policy: StalenessPolicy, snapshot_every: int) -> None:
        self.policy = policy
        self.snapshot_every = snapshot_every
        self.log: list[bytes] = []
        self.sealed: list[Candidate] = []
        self.account = Account()
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
        self._trainable(record, batch)
        self.account.note(record)
        self.account.compare(lsn, ledger.snapshot())
        assert self.account.findings == []
        assert vars(Ledger.from_snapshot(lsn, ledger.snapshot())) == vars(ledger)

    def _trainable(self, record: Record, batch: list[Candidate]) -> None:
        """`batch` are the sealed groups that a step trains, in its order."""
        assert [str(c.uid) for c in batch] == (list(record.trained) if isinstance(record, Step) else [])
        for c in batch:
            assert c.tombstone is None, "a group without members was trained"
            assert c.newest is None or c.newest in self.account.line, "an abandoned version was trained"
            lag = self.account.lag(c.version)
            assert lag is not None and lag <= self.policy.alpha, "trained past alpha, or of an abandoned version"

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
        line = self.account.line
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
