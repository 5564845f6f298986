"""Redundancy: what counts, how much more to start, and that replacing failures prefers no length."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.redundancy import Mode, RedundancyPolicy, batch_time, spares_worth


@settings(max_examples=40)
@given(
    needed=st.integers(1, 5),
    spares=st.integers(0, 3),
    order=st.permutations(range(8)),
    failed=st.sets(st.integers(0, 7)),
)
def test_replacing_failures_chooses_by_number_alone(needed, spares, order, failed):
    policy = RedundancyPolicy(extra_members=spares)
    members = range(needed + spares)
    failed &= set(members)
    finished = [m for m in order if m in members and m not in failed]
    chosen = policy.chosen(needed, finished, failed)
    if policy.hopeless(failed):
        assert chosen is None
    else:
        assert chosen == sorted(m for m in members if m not in failed)[:needed]
        assert chosen == policy.chosen(needed, sorted(finished), failed), "the order of finishing chose"


def test_a_spare_does_not_stand_in_for_a_slow_member():
    policy = RedundancyPolicy(extra_members=1)
    assert policy.chosen(2, [1, 2], set()) is None
    assert policy.chosen(2, [1, 2], {0}) == [1, 2]


def test_first_finished_takes_what_finishes_first():
    policy = RedundancyPolicy(Mode.FIRST_FINISHED, extra_members=2, extra_groups=1)
    assert policy.chosen(2, [3], set()) is None
    assert policy.chosen(2, [3, 0, 1], set()) == [0, 3]
    assert policy.examined(4, 4) == 5


@pytest.mark.parametrize("arguments", [{"extra_members": -1}, {"extra_groups": 1}])
def test_impossible_redundancy_is_refused(arguments):
    with pytest.raises(ValueError, match="extra"):
        RedundancyPolicy(**arguments)


def outcomes(durations, members):
    """Every first try of all members (seconds, failed), with what a second one would take, and its weight."""
    one = [(d, failed, again) for d in durations for failed in (False, True) for again in durations]
    return product(one, repeat=members)


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.6])
def test_the_time_of_a_batch_is_that_of_all_outcomes(rate, spares):
    """By playing every outcome of the members through the policy. A try that fails when no spare is left is the last of
    those that fail, so with unequal durations it is a little later than by chance: equal ones are exact."""
    policy, durations, needed = RedundancyPolicy(extra_members=spares), [2.0], 2
    mean = total = 0.0
    for tries in outcomes(durations, needed + spares):
        weight = 1.0
        for _, fails, _ in tries:
            weight *= rate if fails else 1 - rate
        failed = {m for m, (_, fails, _) in enumerate(tries) if fails}
        gone = set(sorted(failed)[:spares])
        chosen = policy.chosen(needed, [m for m in range(needed + spares) if m not in gone], gone)
        ends = [tries[m][0] + (tries[m][2] if m in failed else 0.0) for m in chosen]
        mean, total = mean + weight * max(ends), total + weight
    assert batch_time(durations, needed, spares, rate) == pytest.approx(mean / total)


def test_the_time_of_several_groups_is_that_of_the_last():
    durations = [1.0, 2.0, 5.0]
    mean = sum(max(d) for d in product(durations, repeat=4)) / 3**4
    assert batch_time(durations, needed=2, spares=0, failure_rate=0.0, groups=2) == pytest.approx(mean)
    assert batch_time(durations, needed=2, spares=1, failure_rate=0.0, groups=2) == pytest.approx(mean)
    with pytest.raises(ValueError, match="failure_rate"):
        batch_time(durations, 2, 0, 1.5)


def test_a_spare_is_worth_it_where_a_second_try_holds_up_the_step():
    even, uneven = [10.0] * 16, [1.0] * 15 + [30.0]
    assert spares_worth(even, 8, 0.0, groups=8) == 0, "nothing fails"
    assert spares_worth(even, 8, 0.05, groups=8) == 2
    assert spares_worth(uneven, 8, 0.05, groups=8) == 0, "the step waits for the long ones anyway"
    assert spares_worth(uneven, 8, 0.05, groups=8, price=0.0) == 3, "if work costs nothing"
