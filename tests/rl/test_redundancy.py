"""Redundancy: what counts, how much more to start, and that replacing failures prefers no length."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.redundancy import (
    Mode,
    RedundancyPolicy,
    extra_worth,
    first_finished_gain,
    spares_needed,
)  # fmt: skip


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


@settings(max_examples=12)
@given(needed=st.integers(1, 4), rate=st.sampled_from([0.0, 0.05, 0.2, 0.5]))
def test_spares_are_the_fewest_that_assure_a_group(needed, rate):
    def assured(spares: int) -> float:
        """By counting every outcome of the members."""
        total = 0.0
        for outcome in product((False, True), repeat=needed + spares):
            if sum(outcome) <= spares:
                probability = 1.0
                for fails in outcome:
                    probability *= rate if fails else 1 - rate
                total += probability
        return total

    spares = spares_needed(needed, rate, assurance=0.9)
    assert assured(spares) >= 0.9 - 1e-12
    assert spares == 0 or assured(spares - 1) < 0.9


def test_the_gain_is_that_of_all_equally_likely_draws():
    durations, needed, extra = [1.0, 2.0, 5.0], 2, 1
    alone = sum(max(d) for d in product(durations, repeat=needed)) / 3**needed
    more = sum(sorted(d)[needed - 1] for d in product(durations, repeat=needed + extra)) / 3 ** (needed + extra)
    gain = first_finished_gain(durations, needed, extra)
    assert gain.time == pytest.approx(more / alone)
    assert gain.work == pytest.approx(1.5)


def test_more_is_started_only_where_a_tail_pays_for_it():
    assert extra_worth([10.0] * 20, needed=32, most=8) == 0
    assert extra_worth([10.0] * 19 + [100.0], needed=32, most=8) > 0
