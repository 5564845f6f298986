"""What became of an attempt, for people, by the log."""

from __future__ import annotations

from infra.store.browse import Fate, State, fates
from rl.records import Outcome, Reason, Rollback, Settle
from rl.rollback import rolled_back
from rl.trajectory import Uid
from tests.rl.histories import common, drop, history, step


def test_fates_are_those_of_the_live_line() -> None:
    records, ledger = history(4)  # version v trains ordinal v - 1
    records.append(Settle(**common(7), dropped=(drop("9.0", Outcome.ABANDON, Reason.TOO_LONG),)))
    ledger.apply(records[-1])
    records.append(Rollback(**common(8), to=2, snapshot=rolled_back(records, 2)))
    ledger.apply(records[-1])
    records.append(step(9, 5, 2, trained=("2.1",), dropped=(drop("3.1"),), segments=("groups/x",)))
    ledger.apply(records[-1])

    undone = Fate(State.DROPPED, reason="rolled_back")
    assert fates(records) == {
        Uid(0, 0): Fate(State.TRAINED, 1),
        Uid(1, 0): Fate(State.TRAINED, 2),
        Uid(2, 0): undone,
        Uid(3, 0): undone,
        Uid(9, 0): Fate(State.DROPPED, reason="too_long"),
        Uid(2, 1): Fate(State.TRAINED, 5, segment="groups/x"),
        Uid(3, 1): Fate(State.DROPPED, reason="stale"),
    }
    assert all(not ledger.is_open(uid) for uid in fates(records))
