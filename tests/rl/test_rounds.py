"""Rounds: nobody is two versions ahead of anybody, and nobody is waited for that is gone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rl.rounds import Rounds


@given(st.lists(st.sampled_from("abc"), max_size=60))
def test_all_train_a_version_before_anybody_begins_the_next(order):
    rounds, serving, rolled = Rounds(), dict.fromkeys("abc", 0), dict.fromkeys("abc", 0)
    rounds.look(serving)
    for job in order:
        if rounds.may(job, serving[job]):
            rolled[job] += 1
            serving[job] += 1
        rounds.look(serving)
        assert max(rolled.values()) - min(rolled.values()) <= 1


def test_one_that_comes_in_the_middle_waits_for_the_next_round_and_one_that_left_holds_up_nobody():
    rounds = Rounds()
    rounds.look({"a": None, "b": 0})
    assert not rounds.may("a", None) and not rounds.may("b", 0), "a's first version is not served yet"
    rounds.look({"a": 0, "b": 0})
    assert rounds.may("a", 0) and rounds.may("b", 0)
    rounds.look({"a": 1, "b": 0, "c": 0})
    assert not rounds.may("a", 1) and rounds.may("b", 0) and not rounds.may("c", 0)
    rounds.look({"a": 1, "c": 0})
    assert rounds.may("a", 1) and rounds.may("c", 0)
