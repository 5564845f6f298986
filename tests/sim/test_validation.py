"""The published numbers: what is fitted and what is predicted, and how far off the quick predictions are."""

from __future__ import annotations

import pytest

from sim.validation import parts
from sim.validation.rows import GOAL, ROWS, Row
from sim.validation.table import Checked, check, share_right

OFF = {"exposed pull 14B"}
"""Of the weights: its published time does not lie between those of the smaller and the larger model's."""


def test_at_most_a_third_of_the_rows_is_fitted():
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert sum(row.fitted is not None for row in ROWS) <= len(ROWS) / 3


def test_an_error_is_the_distance_to_the_published_range():
    row = Row("x", 2.0, 4.0, "s")
    assert [row.error(v) for v in (1.0, 2.0, 3.0, 4.0, 5.0)] == [-0.5, 0.0, 0.0, 0.0, 0.25]
    checked = [Checked(row, 3.0), Checked(row, 5.0), Checked(Row("y", 1.0, 1.0, "s", "something"), 9.0)]
    assert share_right(checked) == 0.5


def test_weights_travel_as_published():
    for row in check([parts.weights]):
        print(row)
        assert row.right or row.row.name in OFF, row


@pytest.mark.slow
def test_lockstep_and_redundancy_are_predicted():
    checked = check([parts.latency_spread, parts.redundancy])
    for row in checked:
        print(row)
    assert share_right(checked) >= 0.8
    assert all(abs(row.error) < 2 * GOAL for row in checked), [str(row) for row in checked if not row.right]


@pytest.mark.slow
def test_the_published_step_has_its_parts():
    found = {row.row.name: row for row in check([parts.swe_step])}
    for row in found.values():
        print(row)
    for name in ("swe step", "swe generation share", "swe training share", "swe reset share"):
        assert found[name].right, found[name]
