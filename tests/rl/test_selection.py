"""Selection, admission and the staleness bound, by example."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.errors import StalenessViolation
from rl.ledger import Ledger
from rl.records import Outcome, Reason, Rollback, Settle
from rl.rollback import rolled_back
from rl.selection import Candidate, DropPolicy, admissible, doomed, select
from rl.staleness import StalenessPolicy
from rl.trajectory import Uid
from tests.rl.histories import common, drop, history

TWO = StalenessPolicy(alpha=1, groups_per_step=2, examined_per_step=3)


def group(ordinal: int, version: int = 3, informative: bool = True, **more: Any) -> Candidate:
    return Candidate(Uid(ordinal, 0), version, informative, **more)


def test_a_batch_is_fifo_oldest_version_first() -> None:
    _, ledger = history(3)
    found = select(ledger, [group(9), group(5), group(8, 2)], TWO, DropPolicy())
    assert [c.uid.ordinal for c in found.batch] == [8, 5] and not found.dropped


def test_groups_without_signal_are_replaced_up_to_what_may_be_examined() -> None:
    _, ledger = history(3)
    found = select(ledger, [group(4, informative=False), group(5), group(6)], TWO, DropPolicy())
    assert [c.uid.ordinal for c in found.batch] == [5, 6]
    assert found.dropped == [drop("4.0", Outcome.ABANDON, Reason.EQUAL_REWARD)]
    few = select(ledger, [group(4, informative=False), group(5, informative=False), group(6)], TWO, DropPolicy())
    assert [c.uid.ordinal for c in few.batch] == [6] and len(few.dropped) == 2


def test_a_poll_that_finds_too_little_changes_nothing() -> None:
    _, ledger = history(3)
    found = select(ledger, [group(4, informative=False), group(5)], TWO, DropPolicy())
    assert not found.batch and not found.dropped


def test_when_none_of_those_examined_has_signal_they_are_dropped_without_a_batch() -> None:
    _, ledger = history(3)
    found = select(ledger, [group(n, informative=False) for n in (4, 5, 6)], TWO, DropPolicy())
    assert not found.batch and len(found.dropped) == 3


def test_copies_of_an_attempt_count_once_and_a_whole_group_goes_before_a_tombstone() -> None:
    _, ledger = history(3)
    copies = [group(4, tombstone="reward_error"), group(4), group(4), group(5), group(0), group(6)]
    found = select(ledger, copies, TWO, DropPolicy())
    assert [c.uid.ordinal for c in found.batch] == [4, 5] and not found.dropped
    assert found.duplicates == 3, "two copies, and one of an ordinal that is trained already"


def test_a_group_with_any_token_of_an_abandoned_version_is_drawn_again() -> None:
    records, ledger = history(3)
    ledger.apply(Rollback(**common(6), to=2, snapshot=rolled_back(records, 2)))
    candidates = [group(7, 3), group(8, 2, newest=3), group(9, 2), group(10, 2, newest=2)]
    found = select(ledger, candidates, TWO, DropPolicy())
    assert [c.uid.ordinal for c in found.batch] == [9, 10]
    assert {d.uid: d.reason for d in found.dropped} == {"7.0": Reason.ROLLED_BACK, "8.0": Reason.ROLLED_BACK}


def test_budgets_are_by_kind_of_failure() -> None:
    _, ledger = history(1)
    policy, uid = DropPolicy(stale_attempts=2, failed_attempts=2), Uid(5, 0)
    assert policy.drop(ledger, uid, Reason.STALE).outcome is Outcome.RETRY
    ledger.apply(Settle(**common(4), dropped=(drop("5.0"),)))
    assert policy.drop(ledger, Uid(5, 1), Reason.STALE).outcome is Outcome.RETRY
    assert policy.drop(ledger, Uid(5, 1), Reason.REWARD_ERROR).outcome is Outcome.RETRY
    assert policy.drop(ledger, Uid(5, 1), Reason.ROLLED_BACK).outcome is Outcome.RETRY
    ledger.apply(Settle(**common(5), dropped=(drop("5.1", reason=Reason.ENVIRONMENT_ERROR),)))
    assert policy.drop(ledger, Uid(5, 2), Reason.REWARD_ERROR).outcome is Outcome.ABANDON


def test_what_the_coming_step_puts_out_of_the_window_is_dropped_with_it() -> None:
    _, ledger = history(3)
    candidates = [group(4, 2), group(5, 2), group(6, 3), group(7, 3, tombstone="reward_error"), group(8, 2)]
    late = doomed(ledger, candidates, {Uid(4, 0), Uid(8, 0)}, TWO, DropPolicy())
    assert {d.uid: d.reason for d in late} == {"5.0": Reason.STALE, "7.0": Reason.REWARD_ERROR}


def test_staleness_is_checked_at_the_last_moment_too() -> None:
    _, ledger = history(3)
    assert TWO.check(ledger, "4.0", 3) == 0 and TWO.check(ledger, "4.0", 2) == 1
    for version in (1, 9):
        with pytest.raises(StalenessViolation, match=r"4\.0"):
            TWO.check(ledger, "4.0", version)


def test_a_reader_starts_at_the_oldest_version_that_can_still_be_trained() -> None:
    assert [StalenessPolicy(alpha, 1, 1).floor(history(3)[1]) for alpha in range(5)] == [3, 2, 1, 0, 0]
    assert StalenessPolicy(1, 1, 1).floor(Ledger()) == 0


@pytest.mark.parametrize("bad", [(-1, 1, 1), (0, 0, 1), (0, 2, 1)])
def test_impossible_sizes_are_refused(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="impossible"):
        StalenessPolicy(*bad)


def test_nothing_is_admitted_without_a_version_or_under_an_abandoned_one() -> None:
    assert admissible(Ledger(), 0, [], set(), TWO, DropPolicy()) == []
    records, ledger = history(3)
    ledger.apply(Rollback(**common(6), to=1, snapshot=rolled_back(records, 1)))
    assert admissible(ledger, 3, [], set(), TWO, DropPolicy()) == []
    assert admissible(ledger, 1, [], set(), TWO, DropPolicy())[:3] == [Uid(1, 1), Uid(2, 1), Uid(3, 0)]


def test_admission_stops_short_of_the_last_version() -> None:
    _, ledger = history(3)
    for steps, groups in ((9, 6), (5, 6), (4, 3), (3, 0)):
        policy = StalenessPolicy(1, 2, 3, steps=steps)
        assert len(admissible(ledger, 3, [], set(), policy, DropPolicy())) == groups
    assert len(admissible(ledger, 2, [], {Uid(3, 0)}, TWO, DropPolicy())) == 3 - 1


def strike(ledger: Ledger, ordinal: int, times: int, reason: Reason = Reason.STALE) -> Uid:
    """Drop the open attempt of a problem so often; returns the attempt then open."""
    for _ in range(times):
        attempt = ledger.open_attempt(ordinal)
        ledger.apply(Settle(**common(ledger.lsn + 1), dropped=(drop(f"{ordinal}.{attempt}", reason=reason),)))
    return next(uid for uid in ledger.outstanding() if uid.ordinal == ordinal)


@pytest.mark.parametrize("alpha", [0, 1, 2])
def test_a_problem_that_grew_too_old_too_often_is_waited_for(alpha: int) -> None:
    _, ledger = history(3)
    policy, drops = StalenessPolicy(alpha, 2, 2), DropPolicy(stale_attempts=2)
    ready = [group(4, 3), group(5, 3), group(6, 3)]
    once = strike(ledger, 9, 1)
    assert not select(ledger, ready, policy, drops).awaited and not drops.protected_attempts(ledger)
    uid = strike(ledger, 9, 1)
    held = alpha < 2  # under alpha 2 this step leaves it fresh enough for the next one
    found = select(ledger, ready, policy, drops)
    assert (found.awaited, bool(found.batch)) == ([uid] if held else [], not held)
    crowd = [group(n, 3) for n in range(20, 40)]
    assert admissible(ledger, 3, crowd, set(), policy, drops) == [uid], "it starts though the buffer is full"
    assert admissible(ledger, 3, crowd, {uid}, policy, drops) == []
    sealed = Candidate(uid, 3, True)
    assert select(ledger, [*ready, sealed], policy, drops).batch
    assert not select(ledger, [*ready, sealed], policy, drops).awaited
    assert select(ledger, [Candidate(once, 3, True), *ready], policy, drops).awaited == ([uid] if held else [])
    gone = drops.drop(ledger, uid, Reason.STALE)
    assert (gone.reason, gone.outcome) == (Reason.TOO_LONG, Outcome.ABANDON)
    assert drops.drop(ledger, uid, Reason.REWARD_ERROR).outcome is Outcome.RETRY, "an accident is no length"


def test_a_batch_has_the_mix_of_its_domains_as_far_as_they_are_there() -> None:
    _, ledger = history(3)
    policy = StalenessPolicy(2, 4, 4)
    fast = [group(n, 3, domain="fast") for n in range(4, 10)]
    slow = [group(n, 3, domain="slow") for n in range(10, 13)]
    quotas = {"fast": 2, "slow": 2}

    def picked(candidates: list[Candidate]) -> list[int]:
        return [c.uid.ordinal for c in select(ledger, candidates, policy, DropPolicy(), quotas).batch]

    assert picked([*fast, *slow]) == [4, 5, 10, 11]
    assert picked([*fast, *slow[:1]]) == [4, 5, 10, 6], "no batch waits for a domain"
    due = [group(n, 1, domain="fast") for n in range(20, 23)]
    assert picked([*fast, *slow, *due]) == [20, 21, 22, 10], "nothing is wasted for the mix"
    assert [c.uid.ordinal for c in select(ledger, [*fast, *slow], policy, DropPolicy()).batch] == [4, 5, 6, 7]


def test_bytes_bound_admission_but_never_below_a_step() -> None:
    _, ledger = history(3)
    policy = StalenessPolicy(3, 2, 2)
    assert [len(admissible(ledger, 3, [], set(), policy, DropPolicy(), most)) for most in (None, 99, 5, 1, 0)] == [
        8, 8, 5, 2, 2,
    ]  # fmt: skip


def test_choosing_compares_no_group_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step looks at some hundreds of groups: pairwise comparisons of them took most of a big run's selection."""
    _, ledger = history(3)
    many = StalenessPolicy(alpha=1, groups_per_step=200, examined_per_step=200)
    sealed = [group(ordinal, 2 + ordinal % 2) for ordinal in range(1300, 1000, -1)]
    compared = 0

    def same(self: Any, other: object) -> bool:
        nonlocal compared
        compared += 1
        return self is other

    monkeypatch.setattr(Candidate, "__eq__", same)
    monkeypatch.setattr(Uid, "__lt__", lambda *_: pytest.fail("uids were ordered by comparing them as objects"))
    chosen = select(ledger, sealed, many, DropPolicy())
    assert len(chosen.batch) == 200 and compared == 0
    assert [c.version for c in chosen.batch] == [2] * 150 + [3] * 50


@settings(deadline=None)
@given(
    sealed=st.lists(st.sampled_from([1, 2, 3]), max_size=6),
    flying=st.lists(st.sampled_from([1, 2, 3]), max_size=8),
    order=st.randoms(use_true_random=False),
)
def test_no_batch_forms_before_as_many_are_sealed_as_are_missing(sealed, flying, order) -> None:
    _, ledger = history(3)
    policy = StalenessPolicy(alpha=2, groups_per_step=4, examined_per_step=4)
    ready = [group(10 + n, version) for n, version in enumerate(sealed)]
    started = {Uid(50 + n, 0): version for n, version in enumerate(flying)}
    found = select(ledger, ready, policy, DropPolicy(), in_flight=started)
    assert bool(found.batch) != bool(found.missing)
    ends = order.sample(sorted(started), len(started))
    counted = 0
    for uid in ends:
        counted += uid in found.awaited or not found.awaited
        ready.append(group(uid.ordinal, started.pop(uid)))
        if counted < found.missing:
            assert not select(ledger, ready, policy, DropPolicy(), in_flight=started).batch
