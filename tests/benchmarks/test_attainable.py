"""How short a step can be: by hand, and against runs under the virtual clock, none of which is shorter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.attainable import StepTimes, least_step
from rl.modes import MODES
from sim.machine import StageTimes, predicted_step

BEFORE = 4


def steps(batches: list[tuple[float, ...]], train: float) -> list[StepTimes]:
    """Steps that were made one after the other without a pause."""
    ends = [train * (n + 1) for n in range(len(batches))]
    return [StepTimes(end - train, end, groups) for end, groups in zip(ends, batches, strict=True)]


def least(mode: str, batches: list[tuple[float, ...]], train: float, alpha: int = 1, **more: float | bool) -> float:
    known = MODES[mode]
    before = [(0.0,)] * BEFORE
    made = steps([*before, *batches], train)
    work, waits = float(more.get("work", 0.0)), bool(more.get("waits", known.waits))
    return least_step(known, 0 if known.alternates else alpha, waits, made[:BEFORE], made[BEFORE:], work)


def test_equal_steps_take_what_their_order_says():
    batches, train = [(4.0, 8.0)] * 40, 2.0
    assert least("sync", batches, train) == least("sync_plus", batches, train) == 10.0
    assert least("one_off", batches, train) == pytest.approx(8.0, rel=0.05)
    assert least("rollart", batches, train) == pytest.approx(5.0, rel=0.05)
    assert least("rollart", batches, train, alpha=4) == pytest.approx(2.0, rel=0.15)
    assert least("areal", batches, train) == 3.0, "the mean group over two batches in flight"
    assert least("rollart", batches, train, waits=False) == 3.0
    assert least("rollart", batches, train, work=7.5) == 7.5


def test_one_long_group_is_shared_with_nobody_but_the_steps_beside_it():
    """The mean of the slowest over alpha + 1 is another figure: 100 s in ten steps would cost 5 s of each."""
    batches = [(1.0,)] * 5 + [(100.0,)] + [(1.0,)] * 4
    assert least("sync_plus", batches, 1.0) == pytest.approx((9 * 2 + 101) / 10)
    assert least("rollart", batches, 1.0) == pytest.approx((9 * 1 + 100) / 10, rel=0.03)


@given(
    st.lists(st.tuples(*[st.floats(0.1, 50.0)] * 3), min_size=1, max_size=12), st.floats(0.1, 5.0), st.integers(1, 4)
)
def test_what_may_overlap_more_takes_no_longer(batches: list[tuple[float, ...]], train: float, alpha: int):
    turns, eager = least("sync_plus", batches, train), least("rollart", batches, train, alpha=alpha)
    assert eager <= turns * (1 + 1e-9)
    assert least("rollart", batches, train, alpha=alpha + 1) <= eager * (1 + 1e-9)
    assert least("six_steps", batches, train, alpha=alpha) <= turns * (1 + 1e-9)
    longer = [tuple(g + 1.0 for g in batch) for batch in batches]
    assert least("rollart", longer, train, alpha=alpha) >= eager * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync_plus", "one_off", "rollart", "areal"])
@pytest.mark.parametrize("batches", [[(3.0, 5.0, 8.0, 4.0)] * 5, [(2.0, 3.0)] * 6 + [(2.0, 60.0)] + [(3.0, 2.0)] * 3])
def test_no_run_of_the_policies_is_shorter(mode: str, batches: list[tuple[float, ...]]):
    alpha = MODES[mode].alphas[0]
    found = predicted_step(StageTimes(mode, alpha, tuple(batches), train_s=0.5))
    shortest = least(mode, batches * 20, 0.5)
    assert shortest * 0.99 <= found <= shortest * 1.5
