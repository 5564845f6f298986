"""The published numbers, each a test: within a tenth, or named among those that are off, and then really off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from sim.validation.misses import MISSES
from sim.validation.rows import BY_EXPERIMENT, ROWS, Row
from sim.validation.table import WHOLE, Checked, share_right

EXPERIMENTS = {experiment.__name__: experiment for experiment in WHOLE}
SLOW = ("redundancy", "prefill_decode", "swe_step", "affinity", "scaling", "production")
"""Seconds each of one core."""
FULL = ("whole_chain", "mixes", "bounds")
"""Minutes together."""
AS_ABOVE = "as above"
DOCUMENTED = 0.02
"""How far a prediction may be from what the page says, which is rounded."""


@cache
def predictions(experiment: str) -> Mapping[str, float]:
    """All rows of an experiment come from one computation."""
    return EXPERIMENTS[experiment]()


def each_row() -> Iterator[object]:
    for experiment, rows in BY_EXPERIMENT.items():
        marks = [pytest.mark.slow] if experiment in SLOW else []
        marks = [pytest.mark.full, pytest.mark.timeout(1800)] if experiment in FULL else marks
        for row in rows:
            yield pytest.param(experiment, row, id=row.name, marks=marks)


@pytest.mark.parametrize(("experiment", "row"), list(each_row()))
def test_a_published_number_is_predicted(experiment: str, row: Row) -> None:
    checked = Checked(row, predictions(experiment)[row.name])
    print(checked)
    assert checked.right == (row.name not in MISSES), str(checked)
    if row.name in MISSES:
        assert checked.predicted == pytest.approx(float(documented()[row.name][1]), rel=DOCUMENTED)


def test_every_row_belongs_to_one_experiment_and_at_most_a_third_is_fitted():
    assert EXPERIMENTS.keys() == BY_EXPERIMENT.keys() and set(SLOW + FULL) < EXPERIMENTS.keys()
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert sum(row.fitted is not None for row in ROWS) <= len(ROWS) / 3


def test_an_error_is_the_distance_to_the_published_range():
    row = Row("x", 2.0, 4.0, "s")
    assert [row.error(v) for v in (1.0, 2.0, 3.0, 4.0, 5.0)] == [-0.5, 0.0, 0.0, 0.0, 0.25]
    checked = [Checked(row, 3.0), Checked(row, 5.0), Checked(Row("y", 1.0, 1.0, "s", "something"), 9.0)]
    assert share_right(checked) == 0.5


def test_the_page_tells_of_each_miss_and_of_nothing_else():
    """In the order of the rows, with what was published and the reason; no row that was fitted is off."""
    of_name, found = {row.name: row for row in ROWS}, documented()
    assert list(found) == [row.name for row in ROWS if row.name in MISSES] and found.keys() == MISSES.keys()
    assert not [name for name in MISSES if of_name[name].fitted]
    for name, (published, predicted, error, reason) in found.items():
        checked = Checked(of_name[name], float(predicted))
        assert published == checked.published and reason == MISSES[name], name
        assert float(error.removesuffix(" %")) == pytest.approx(100 * checked.error, abs=1.0), name
    page = page_text()
    free = [row for row in ROWS if row.fitted is None]
    assert f"({len(ROWS) - len(free)} of {len(ROWS)}, at most a third)" in page
    right = len(free) - len(MISSES)
    assert f"of {len(free)} that nothing was fitted to | {right / len(free):.2f} ({right})" in page


def page_text() -> str:
    return (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()


@cache
def documented() -> Mapping[str, tuple[str, str, str, str]]:
    """Published, predicted, error and reason of the rows of the page's table of misses."""
    _, _, after = page_text().partition("| row | published | predicted | error | reason |\n")
    lines = after.partition("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    for before, one in pairwise(cells):
        one[-1] = before[-1] if one[-1] == AS_ABOVE else one[-1]
    return {name: (published, predicted, error, reason) for name, published, predicted, error, reason in cells}
