"""How many trajectories are in flight: enough for the engines, within bounds, whatever is seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.concurrency import Concurrency, Load

LOADS = st.builds(Load, st.integers(0, 400), st.integers(0, 400), st.integers(0, 50), st.floats(0, 1))


@given(slots=st.integers(1, 64), least=st.integers(1, 32), more=st.integers(0, 300), loads=st.lists(LOADS, max_size=60))
def test_the_limit_stays_within_its_bounds(slots, least, more, loads):
    found = Concurrency(slots, least, least + more)
    twin = Concurrency(slots, least, least + more)
    for load in loads:
        assert least <= found.look(load) <= least + more and twin.look(load) == found.limit
    found.need(least + more // 2)
    assert all(found.look(load) >= least + more // 2 for load in loads)


def settle(share_in_environments: float, slots: int = 32, most: int = 1000) -> int:
    """The limit that is found where that share of the trajectories in flight is in its environment."""
    found = Concurrency(slots, 4, most)
    for _ in range(60):
        asking = int(found.limit * (1 - share_in_environments))
        found.look(Load(found.limit, max(0, asking - slots), 0, 0.1))
    return found.limit


def test_slow_environments_get_more_trajectories_and_the_engines_stay_full():
    quick, slow = settle(0.1), settle(0.9)
    assert 32 <= quick * 0.9 <= 2 * 32 + 8 and 32 <= slow * 0.1 <= 2 * 32 + 8 and slow > 5 * quick


def test_what_does_not_fit_is_started_less():
    found = Concurrency(32, 4, 1000)
    found.look(Load(32, 0, 3, 0.5))
    before = found.limit
    assert found.look(Load(32, 0, 4, 0.5)) < before
    assert found.look(Load(32, 0, 4, 0.99)) < 0.7 * before


def test_it_is_widened_quickly_until_something_waits_for_the_first_time():
    found = Concurrency(32, 4, 1000)
    assert [found.look(Load(found.limit, 0, 0, 0.1)) for _ in range(3)] == [64, 128, 256]
    assert found.look(Load(256, 20, 0, 0.1)) == 256, "enough"
    assert found.look(Load(256, 0, 0, 0.1)) == 288, "from then on with care"
    tight = Concurrency(32, 4, 1000)
    assert tight.look(Load(32, 0, 0, 0.6)) == 36, "as much again would not fit"


def test_unused_room_is_not_widened():
    found = Concurrency(32, 4, 1000)
    assert [found.look(Load(3, 0, 0, 0.0)) for _ in range(5)] == [32] * 5


@given(group=st.integers(2, 64), slots=st.integers(1, 64))
def test_groups_of_any_size_get_more_room_while_nothing_waits(group, slots):
    """Only whole groups start, so the limit itself may never be reached."""
    found = Concurrency(slots, 2, 512)
    found.need(group)
    for _ in range(40):
        found.look(Load(found.limit // group * group, 0, 0, 0.1))
    assert found.limit > 512 - group


def test_room_for_a_large_group_is_given_back_and_follows_the_workers():
    found = Concurrency(4, 2, 512)
    found.need(200)
    assert found.limit == 200
    found.need(4)
    for preempted in range(1, 30):
        found.look(Load(found.limit, 0, preempted, 0.5))
    assert found.limit == 4
    found.resize(3)
    assert found.limit == 3
    found.resize(64)
    for _ in range(40):
        found.look(Load(found.limit, 0, 29, 0.1))
    assert found.limit == 64


def test_impossible_bounds_are_refused():
    with pytest.raises(ValueError, match="from 5 to 4 trajectories"):
        Concurrency(8, 5, 4)
