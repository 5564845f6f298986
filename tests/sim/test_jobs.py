"""Jobs of a service on a real machine, from their stage times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sim.jobs import JobTimes, ServiceTimes, predicted_seconds

JOB = JobTimes(begins_s=2.0, ready_s=0.5, group_s=4.0, rollout_s=4.0, gather_s=0.25, train_s=0.5, push_s=0.25)
"""Without any spread: a step takes 5.5 s, the first one 7.0."""
ONCE = (0,)

MEASURED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "tenant_times.json").read_text())
"""What a run of `python -m benchmarks.tenants --json` printed, the one that docs/tenants.md tells of: of each set of
jobs the seconds from the first submission to the last commit, and the stage times of every job."""


OFF = {("ours", 32): 0.12, ("rounds", 32): 0.13}
"""What is beyond a tenth, as docs/simulator.md tells."""


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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("found", MEASURED, ids=lambda found: f"{found['name']}-{len(found['jobs'])}")
def test_what_was_measured_is_predicted(found: dict[str, Any]) -> None:
    """Within a tenth, but for what is named."""
    given = {name: value for name, value in found.items() if name not in ("name", "seconds", "jobs")}
    times = ServiceTimes(jobs=tuple(JobTimes(*job) for job in found["jobs"]), **given)
    assert predicted_seconds(times) == pytest.approx(
        found["seconds"], rel=OFF.get((found["name"], len(found["jobs"])), 0.10)
    )
