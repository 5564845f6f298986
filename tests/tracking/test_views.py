"""Names of metrics, the table of versions, and the pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from infra.tracking.metrics import METRICS, project
from infra.tracking.plots import (
    Lane,
    busy_intervals,
    concurrency,
    idle_ratio,
    reward_curve,
    timeline,
    versions_table,
)
from rl.ledger import Ledger
from rl.records import Drop, Outcome, Reason, Record, Rollback, Settle, StateRef, Step
from rl.trajectory import Span

SPANS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda t: Span("generate", float(t[0]), float(sum(t)))),
    max_size=30,
)  # fmt: skip


def step(version: int, **fields: object) -> Step:
    plain = {
        "lsn": version + 1, "nonce": "n", "writer": "t", "time": 1000.0, "version": version,
        "base": version - 1 if version else None, "weights_sha256": "0", "alpha": 1,
        "state": StateRef(prefix="state/1-a/", manifest_sha256="0", full=True),
    }  # fmt: skip
    return Step.model_validate(plain | fields)


def test_metric_names_are_unique_and_valid_in_mlflow() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names) == len({metric.key for metric in METRICS})
    assert all(re.fullmatch(r"[a-z0-9_]+/[a-z0-9_]+", name) for name in names)
    assert all(metric.unit and metric.meaning for metric in METRICS)


def test_projection_names_every_figure_and_leaves_out_what_is_no_number() -> None:
    figures = {
        "reward": 0.5, "reward/correct": 0.4, "dropped_stale": 1.0, "span_train_start": 9.0,
        "something": 2.0, "loss": float("nan"), "grad_norm": float("inf"),
    }  # fmt: skip
    assert project(figures) == {
        "reward/mean": 0.5, "reward/part/correct": 0.4, "offpolicy/dropped/stale": 1.0, "other/something": 2.0,
    }  # fmt: skip


@given(SPANS)
def test_busy_intervals_are_disjoint_and_cover_the_same_time(spans: list[Span]) -> None:
    busy = busy_intervals(spans)
    assert all(a < b for a, b in busy)
    assert all(busy[at][1] < busy[at + 1][0] for at in range(len(busy) - 1))
    seconds = {t for s in spans for t in range(int(s.start), int(s.end))}
    assert sum(b - a for a, b in busy) == len(seconds)
    assert idle_ratio(spans, 0.0, 60.0) == pytest.approx(1 - len(seconds) / 60)


@given(SPANS)
def test_concurrency_counts_the_spans_at_every_moment(spans: list[Span]) -> None:
    times, counts = concurrency(spans)
    assert times == sorted(times)
    assert counts[-1:] in ([], [0])
    for moment, count in zip(times, counts, strict=True):
        assert count == sum(s.start <= moment < s.end for s in spans)


def test_the_table_has_a_line_per_version_with_what_was_dropped_since_the_one_before() -> None:
    stale = Drop(uid="7.0", reason=Reason.STALE, outcome=Outcome.RETRY)
    equal = Drop(uid="8.0", reason=Reason.EQUAL_REWARD, outcome=Outcome.ABANDON)
    after = Ledger()
    after.head = 1
    records: list[Record] = [
        step(0),
        step(1, trained=("0.0", "1.0"), metrics={"reward": 0.5, "lag_max": 1.0}),
        Settle(lsn=3, nonce="n", writer="t", time=1000.0, dropped=(stale,)),
        step(2, lsn=4, trained=("2.0",), dropped=(equal,), metrics={"reward": 0.75, "lag_max": 0.0}),
        Rollback(lsn=5, nonce="n", writer="t", time=1000.0, to=1, snapshot=after.snapshot()),
    ]
    lines = [line.split() for line in versions_table(records).splitlines()]
    assert len(lines) == 2 + 4
    assert lines[2][:7] == ["0", "1", "-", "-", "-", "0", "-"]
    assert lines[3][:7] == ["1", "2", "0", "0.500", "1", "2", "-"]
    assert lines[4][:10] == ["2", "4", "1", "0.750", "0", "1", "1", "equal_reward,", "1", "stale"]
    assert lines[5][:3] == ["back", "to", "1"]


@pytest.mark.parametrize("steps", [0, 1, 2, 40])
def test_the_reward_curve_is_drawn_whatever_there_is(steps: int, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "reward.png"
    trained = [step(0), *(step(v, metrics={"reward": v / 40}) for v in range(1, steps + 1))]
    reward_curve(trained, [(0, "lake", 0.1)] if steps % 2 else [], path)
    assert imread(path).shape == (600, 1200, 4)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_timeline_is_drawn_whatever_there_is(count: int, tmp_path: Path) -> None:
    spans = [Span("train", 100.0 + at, 100.5 + at) for at in range(count)]
    waits = [Span("wait", 100.5 + at, 101.0 + at) for at in range(count)]
    path = tmp_path / "timeline.png"
    timeline([Lane("trainer", spans + waits), Lane("generate", [Span("generate", 99.0, 104.0)] * count)], path)
    assert imread(path).shape == (600, 1200, 4)
