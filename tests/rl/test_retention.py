"""The retention policy: what it keeps, and the floor that follows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.errors import LogCorrupt
from rl.ledger import LINE, Ledger
from rl.records import GcFloor, Mark, Record, Retain, Rollback, StateRef
from rl.retention import Retention, Why, loadable
from rl.rollback import rolled_back
from tests.rl.histories import STATE, common, history, step

POLICIES = st.builds(
    Retention,
    newest=st.integers(1, 30),
    younger_than=st.sampled_from([0, 5.5, 1000]),
    every=st.none() | st.integers(1, 7),
)


@st.composite
def ledgers(draw: st.DrawFn) -> tuple[Ledger, dict[int, float]]:
    """A run of some steps with sparse checkpoints, marks, rollbacks and floors in between, and the ages of the states
    that are there: what was deleted by its operator may be there still."""
    every = draw(st.integers(1, 5))
    records, ledger = history(0)

    def append(record: Record) -> None:
        before = Ledger.from_snapshot(ledger.lsn, ledger.snapshot())
        before.apply(record)
        ledger.apply(record)
        records.append(record)

    for _ in range(draw(st.integers(0, 30))):
        what, lsn = draw(st.sampled_from(["step"] * 8 + ["mark", "rollback", "floor"])), ledger.lsn + 1
        try:
            if what == "step":
                append(step(lsn, ledger.next_version, ledger.head, full=ledger.next_version % every == 0))
            elif what == "mark":
                version = draw(st.integers(0, ledger.next_version - 1))
                append(Retain(**common(lsn), version=version, mark=draw(st.sampled_from(Mark)), state=STATE))
            elif what == "rollback":
                to = draw(st.sampled_from(ledger.line))
                append(Rollback(**common(lsn), to=to, snapshot=rolled_back(records, to)))
            else:
                append(GcFloor(**common(lsn), version=draw(st.integers(ledger.gc_floor, ledger.next_version - 1))))
        except LogCorrupt:
            continue  # what the ledger refuses is not written
    there = [v for v in range(ledger.next_version) if v >= ledger.gc_floor or v in ledger.pins or draw(st.booleans())]
    return ledger, {v: float(ledger.next_version - v) for v in there}


@given(ledgers(), POLICIES)
def test_the_floor_is_one_that_the_log_takes(given: tuple[Ledger, dict[int, float]], policy: Retention) -> None:
    ledger, ages = given
    floor = policy.floor(ledger, ages)
    assert ledger.gc_floor <= floor
    ledger.apply(GcFloor(**common(ledger.lsn + 1), version=floor))
    assert policy.floor(ledger, ages) == floor, "nothing changed, so there is nothing more to let go"


@given(ledgers(), POLICIES)
def test_what_goes_on_or_is_pinned_stays(given: tuple[Ledger, dict[int, float]], policy: Retention) -> None:
    ledger, ages = given
    floor, why = policy.floor(ledger, ages), policy.reasons(ledger, ages)
    assert why.keys() == ages.keys()
    live = [v for v in ages if v not in ledger.deleted and ledger.lag(v) is not None]
    for version in ages:
        if version in ledger.pins:
            assert why[version], "a pinned version is kept"
        if ledger.needed(version) or version in live[-policy.newest :]:
            assert why[version]
        if version in live and policy.every is not None and version % policy.every == 0:
            assert why[version]
        if version in ledger.deleted:
            assert not why[version], "an operator's word is above the policy"
    kept_with_samples = [v for v in live[-policy.newest :] if v >= ledger.gc_floor]
    assert all(v >= floor for v in kept_with_samples)


@given(ledgers(), st.integers(1, 30), st.integers(0, 30))
def test_to_keep_more_never_raises_the_floor(given: tuple[Ledger, dict[int, float]], newest: int, more: int) -> None:
    ledger, ages = given
    assert Retention(newest + more).floor(ledger, ages) <= Retention(newest).floor(ledger, ages)
    assert Retention(newest, 20.0).floor(ledger, ages) <= Retention(newest).floor(ledger, ages)
    assert Retention(newest, every=3).floor(ledger, ages) == Retention(newest).floor(ledger, ages)


def test_a_plain_run() -> None:
    _, ledger = history(30)
    ages = {v: float(30 - v) for v in range(31)}
    assert Retention(5).floor(ledger, ages) == 26
    assert Retention(5, younger_than=7.5).floor(ledger, ages) == 23
    assert Retention(1).floor(ledger, ages) == 29, "alpha is 1: the samples of the version before may be trained still"
    why = Retention(5, every=10).reasons(ledger, ages)
    assert [v for v, reasons in why.items() if reasons] == [0, 10, 20, *range(26, 31)]
    assert why[30] == {Why.HEAD, Why.NEWEST, Why.NEEDED, Why.EVERY} and why[26] == {Why.NEWEST}


def test_a_run_longer_than_the_line_is_kept_by_count() -> None:
    _, ledger = history(150)
    assert Retention(100).floor(ledger, dict.fromkeys(range(151), 0.0)) == 51


@pytest.mark.parametrize("every", [10, LINE - 4, LINE, 100])
@pytest.mark.parametrize("alpha", [0, 1, 16])
def test_the_floor_is_below_what_a_replay_trains_however_far_apart_the_checkpoints(every: int, alpha: int) -> None:
    """Also where the ledger's line no longer has it."""
    ledger = Ledger()
    ledger.apply(step(1, 0, None))
    for v in range(1, 3 * every):
        ledger.apply(step(v + 1, v, v - 1, full=v % every == 0).model_copy(update={"alpha": alpha}))
        oldest = max(0, v - v % every - alpha)
        assert Retention(1).floor(ledger, {v: 0.0}) <= oldest, f"at version {v}"
        ledger.gc_floor = Retention(1).floor(ledger, {v: 0.0})
    assert ledger.gc_floor >= every - alpha, "it rises where that is known"


def test_sparse_checkpoints_hold_the_floor() -> None:
    _, ledger = history(4)
    ledger.apply(step(7, 5, 4))
    for version in range(6, 12):
        ledger.apply(step(version + 2, version, version - 1, full=False))
    assert ledger.newest_full == 5
    assert Retention(1).floor(ledger, dict.fromkeys(range(12), 9.0)) == 4, "a replay from 5 reads samples of version 4"


def test_the_version_of_a_rolled_back_line_does_not_count_as_new() -> None:
    records, ledger = history(6)
    back = Rollback(**common(ledger.lsn + 1), to=3, snapshot=rolled_back(records, 3))
    ledger.apply(back)
    ages = dict.fromkeys(range(7), 1.0)
    assert Retention(2).floor(ledger, ages) == 2
    assert not Retention(2).reasons(ledger, ages)[6]


def test_before_the_first_version_nothing_goes() -> None:
    assert Retention(1).floor(Ledger(), {}) == 0
    ledger = Ledger()
    state = StateRef(prefix="p/", manifest_sha256="0", full=True)
    ledger.apply(step(1, 0, None).model_copy(update={"state": state}))
    assert Retention(1).floor(ledger, {0: 1e9}) == 0


@given(ledgers(), POLICIES, st.data())
def test_what_is_awaited_stays_where_an_engine_can_load_it(
    given: tuple[Ledger, dict[int, float]], policy: Retention, data: st.DataObject
) -> None:
    ledger, ages = given
    live = [v for v in ages if ledger.lag(v) is not None and v not in ledger.deleted and v >= ledger.gc_floor]
    awaited = data.draw(st.sets(st.sampled_from(live))) if live else set()
    floor = policy.floor(ledger, ages, awaited)
    assert all(v >= floor and Why.AWAITED in policy.reasons(ledger, ages, awaited)[v] for v in awaited)
    assert floor <= policy.floor(ledger, ages)
    ledger.apply(GcFloor(**common(ledger.lsn + 1), version=floor))
    assert awaited <= loadable(ledger).keys()
