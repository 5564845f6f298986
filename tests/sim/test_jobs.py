"""Jobs of a service on a real machine, from their stage times."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.jobs import JobTimes, ServiceTimes, predicted_seconds, spread_of

JOB = JobTimes(begins_s=2.0, ready_s=0.5, group_s=4.0, rollout_s=4.0, gather_s=0.25, train_s=0.5, push_s=0.25)
"""Without any spread: a step takes 5.5 s, the first one 7.0."""
ONCE = (0,)

MEASURED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "tenant_times.json").read_text())
"""What `python -m benchmarks.tenants --json` printed of the sets that docs/tenants.md tells of: the seconds from the
first submission to the last commit, and the stage times of every job."""


def test_one_job_takes_the_sum_of_its_stages():
    times = ServiceTimes((JOB,), steps=3, groups_per_step=2)
    assert predicted_seconds(times, ONCE) == pytest.approx(7.0 + 2 * 5.5, rel=0.05)


def test_one_after_another_takes_the_sum_and_together_the_longest():
    slow = replace(JOB, group_s=8.0, rollout_s=8.0)
    both = ServiceTimes((JOB, slow), steps=3, groups_per_step=2)
    assert predicted_seconds(both, ONCE) == pytest.approx(11.0 + 2 * 9.5, rel=0.05)
    apart = predicted_seconds(replace(both, running=1), ONCE)
    assert apart == pytest.approx(18.0 + 30.0, rel=0.05)
    rounds = predicted_seconds(replace(both, schedule="rounds"), ONCE)
    assert rounds == pytest.approx(11.0 + 2 * 9.5, rel=0.05)


def test_what_waits_for_the_trainer_is_predicted_and_no_input():
    heavy = replace(JOB, train_s=6.0)
    times = ServiceTimes((heavy,) * 4, steps=3, groups_per_step=2)
    assert predicted_seconds(times, ONCE) == pytest.approx(6.0 + 12 * 6.0, rel=0.1)


def test_the_spread_gives_the_slowest_group_its_time():
    sigma = spread_of(5.0, 8.0, 8)
    draws = 5.0 * np.exp(np.random.default_rng(1).normal(-(sigma**2) / 2, sigma, (20_000, 8)))
    assert draws.mean() == pytest.approx(5.0, rel=0.01) and draws.max(axis=1).mean() == pytest.approx(8.0, rel=0.02)
    assert spread_of(5.0, 5.0, 8) == pytest.approx(0.0, abs=1e-3)


def jobs_of(found: dict[str, Any]) -> tuple[str, int]:
    return found["name"], len(found["jobs"])


MOST = ("ours", 32)
RATIOS = [jobs_of(found) for found in MEASURED if found["name"] != "ours"]


@cache
def both(name: str, count: int) -> tuple[float, float]:
    """Seconds that were measured, and predicted."""
    found = next(found for found in MEASURED if jobs_of(found) == (name, count))
    given = {key: value for key, value in found.items() if key not in ("name", "seconds", "jobs")}
    return found["seconds"], predicted_seconds(ServiceTimes(tuple(JobTimes(*job) for job in found["jobs"]), **given))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "count"), [jobs_of(found) for found in MEASURED])
def test_what_was_measured_is_predicted(name: str, count: int) -> None:
    """Within a tenth."""
    measured, predicted = both(name, count)
    error = predicted / measured - 1
    print(f"{name} {count}: measured {measured:.1f} s, predicted {predicted:.1f} s, {error:+.1%}")
    assert abs(error) <= 0.10


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "count"), RATIOS)
def test_ratios_that_were_measured_are_predicted(name: str, count: int) -> None:
    """Of the time of the others to that of ours, as `benchmarks.tenants` judges it: that nine jobs stand for 32
    cancels."""
    (measured, predicted), (ours_measured, ours_predicted) = both(name, count), both(*MOST)
    error = predicted / ours_predicted / (measured / ours_measured) - 1
    print(f"{name} over ours: {error:+.1%}")
    assert abs(error) <= 0.10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whether_rounds_are_slower_is_predicted():
    (measured, predicted), (ours_measured, ours_predicted) = both("rounds", 32), both(*MOST)
    assert (measured > ours_measured) is (predicted > ours_predicted)
