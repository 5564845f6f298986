"""The arithmetic of `benchmarks.serverless_reward`: waits in a pool, and the smallest pool that is good enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serverless_reward import ALLOWED_WAIT, Load, make_load, p95, smallest_pool, waits

loads = st.builds(
    make_load,
    members=st.integers(4, 40),
    rollout=st.floats(1, 10),
    train=st.floats(0, 10),
    service=st.floats(0.01, 1),
    last=st.floats(0.01, 1),
    seed=st.integers(0, 100),
)


def test_waits_are_those_of_first_come_first_served() -> None:
    load = Load(ends=(0.0, 0.0, 0.5, 3.0), rollout=4, train=0, service=1.0)
    assert waits(load, 1) == [0.0, 1.0, 1.5, 0.0]
    assert waits(load, 2) == [0.0, 0.0, 0.5, 0.0]


@given(loads)
def test_the_pool_is_good_enough_and_one_less_is_not(load: Load) -> None:
    slots = smallest_pool(load)
    assert p95(waits(load, slots)) < ALLOWED_WAIT * load.step
    assert slots == 1 or p95(waits(load, slots - 1)) >= ALLOWED_WAIT * load.step


def test_a_burst_that_is_served_in_the_allowed_time_uses_a_twentieth_of_its_pool() -> None:
    """Why dedicated workers idle, whatever the load: all end at once, and may wait for 5 % of the step."""
    load = Load(ends=(9.0,) * 400, rollout=9.0, train=1.0, service=0.02)
    used = 400 * load.service / (smallest_pool(load) * load.step)
    assert used == pytest.approx(ALLOWED_WAIT, rel=0.25)
