"""pass@k against its definition: the share of all choices of k samples that hold a solving one."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.pass_at import mean_pass_at, pass_at


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 8))
def test_it_is_the_share_of_choices_that_hold_a_solving_sample(solved: list[bool], k: int) -> None:
    if k > len(solved):
        with pytest.raises(ValueError, match=f"pass@{k}"):
            pass_at(k, sum(solved), len(solved))
        return
    choices = list(combinations(solved, k))
    expected = sum(map(any, choices)) / len(choices)
    assert pass_at(k, sum(solved), len(solved)) == pytest.approx(expected)


def test_problems_that_lack_samples_do_not_count() -> None:
    assert mean_pass_at(2, [[1.0, 0.2], [1.0], [0.0, 0.9]], solved_at=1.0) == 0.5
    assert mean_pass_at(1, [[0.0, 1.0], [0.95]], solved_at=0.9) == 0.75
