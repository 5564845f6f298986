"""Records read back, and what the fold of the log refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rl.errors import LogCorrupt
from rl.ledger import LINE, Ledger
from rl.records import (
    Drop,
    Fence,
    GcFloor,
    Outcome,
    Reason,
    Record,
    Rollback,
    Settle,
    Step,
    decode,
    encode,
    uids,
)
from rl.rollback import rolled_back
from rl.trajectory import Uid
from tests.rl.histories import STATE, common, drop, history, step

# -- records -------------------------------------------------------------------------------------------

UID = st.builds(lambda o, a: f"{o}.{a}", st.integers(0, 99), st.integers(0, 9))
DROPS = st.lists(
    st.builds(Drop, uid=UID, reason=st.sampled_from(Reason), outcome=st.sampled_from(Outcome)), max_size=3
).map(tuple)
COMMON: dict[str, Any] = {
    "lsn": st.integers(1, 10**9),
    "nonce": st.text(max_size=4),
    "writer": st.text(max_size=4),
    "time": st.floats(0, 1e10),
    "snapshot": st.none() | st.integers(0, 5).map(lambda n: history(n)[1].snapshot()) | st.just(Ledger().snapshot()),
}
RECORDS = st.one_of(
    st.builds(Fence, **COMMON),
    st.builds(Settle, dropped=DROPS, **COMMON),
    st.builds(Rollback, to=st.integers(0, 99), **COMMON),
    st.builds(GcFloor, version=st.integers(0, 99), **COMMON),
    st.builds(
        Step, version=st.integers(0, 99), base=st.none() | st.integers(0, 99), state=st.just(STATE),
        weights_sha256=st.just("0"), alpha=st.integers(0, 16), dropped=DROPS,
        trained=st.lists(UID, max_size=3).map(tuple),
        metrics=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3), **COMMON,
    ),
)  # fmt: skip


@given(RECORDS)
def test_records_read_back_equal_and_are_one_json_object(record: Record) -> None:
    body = encode(record)
    assert decode(body) == record
    assert encode(decode(body)) == body
    assert isinstance(json.loads(body), dict)


def test_a_metric_that_is_no_number_does_not_spoil_the_log() -> None:
    body = encode(step(1, 0, None, metrics={"a": float("nan"), "b": float("-inf"), "c": 1.5}))
    metrics = decode(body).metrics  # type: ignore[union-attr]
    assert metrics["a"] != metrics["a"] and metrics["b"] == float("-inf") and metrics["c"] == 1.5
    json.loads(body, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize("change", [{"unknown": 1}, {"kind": "no such"}, {"lsn": 0}, {"version": "x"}, {"state": None}])
def test_anything_else_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        decode(json.dumps(json.loads(encode(step(1, 0, None))) | change).encode())


def test_uids_keep_their_order() -> None:
    assert uids(("9.1", "2.0")) == [Uid(9, 1), Uid(2, 0)]


# -- the fold ------------------------------------------------------------------------------------------

ILLEGAL: dict[str, Record] = {
    "a gap": Fence(**common(6)),
    "a record twice": Fence(**common(4)),
    "a version twice": step(5, 2, 2),
    "a version left out": step(5, 4, 2),
    "another base than the head": step(5, 3, 1),
    "a second initial policy": step(5, 3, None),
    "training what is trained": step(5, 3, 2, trained=("0.0",)),
    "training one ordinal twice": step(5, 3, 2, trained=("7.0", "7.0")),
    "training an attempt that was not granted": step(5, 3, 2, trained=("7.1",)),
    "training and dropping one attempt": step(5, 3, 2, trained=("7.0",), dropped=(drop("7.0"),)),
    "dropping one attempt twice": Settle(**common(5), dropped=(drop("7.0"), drop("7.0"))),
    "dropping what is abandoned": Settle(**common(5), dropped=(drop("7.0", Outcome.ABANDON), drop("7.1"))),
    "a rollback without its snapshot": Rollback(**common(5), to=1),
    "a rollback with the snapshot of another": Rollback(**common(5), to=1, snapshot=history(2)[1].snapshot()),
    "a rollback that gives versions out again": Rollback(**common(5), to=1, snapshot=history(1)[1].snapshot()),
    "a lower gc floor": GcFloor(**common(5), version=-1),
}


@pytest.mark.parametrize("record", ILLEGAL.values(), ids=ILLEGAL)
def test_a_record_that_breaks_a_rule_is_corruption(record: Record) -> None:
    _, ledger = history(2)
    with pytest.raises(LogCorrupt):
        ledger.apply(record)


def test_the_gc_floor_only_rises_and_bounds_a_rollback() -> None:
    records, ledger = history(3)
    records.append(GcFloor(**common(6), version=2))
    ledger.apply(records[-1])
    with pytest.raises(LogCorrupt, match="falls from 2 to 1"):
        ledger.apply(GcFloor(**common(7), version=1))
    assert rolled_back(records, 2).gc_floor == 2
    with pytest.raises(LogCorrupt, match="below the gc floor"):
        rolled_back(records, 1)


@pytest.mark.parametrize("to", [-1, 4, 99])
def test_a_rollback_goes_to_a_version_of_the_live_line(to: int) -> None:
    with pytest.raises(LogCorrupt, match="not on the live line"):
        rolled_back(history(3)[0], to)


def test_what_a_rollback_reopened_and_was_then_abandoned_stays_abandoned() -> None:
    """Back to 2 reopens the ordinal of version 3; it is abandoned; back to 1 must not grant its attempt again."""
    records, ledger = history(3)
    records.append(Rollback(**common(6), to=2, snapshot=rolled_back(records, 2)))
    records.append(Settle(**common(7), dropped=(drop("2.1", Outcome.ABANDON),)))
    for record in records[5:]:
        ledger.apply(record)
    after = Ledger.from_snapshot(7, rolled_back(records, 1))
    assert after.settled(2)
    assert after.open_attempt(1) == 1 and after.open_attempt(0) is None


def test_a_long_run_keeps_a_bounded_line_and_its_newest_full_version() -> None:
    records, ledger = history(LINE + 40, full=False)
    assert len(ledger.line) == LINE and ledger.line[-1] == ledger.head == LINE + 40
    assert ledger.newest_full == 0, "the only one that can be resumed from"
    assert ledger.states.keys() == {0, *ledger.line}
    assert vars(Ledger.from_snapshot(ledger.lsn, ledger.snapshot())) == vars(ledger)
    assert ledger.lag(3) == LINE, "older than the kept line"
    assert ledger.lag(ledger.line[0]) == LINE - 1
    assert rolled_back(records, 5).head == 5, "the whole log still knows it"
    assert len(encode(step(1, 0, None).model_copy(update={"snapshot": ledger.snapshot()}))) < 20_000
