"""The arithmetic of `benchmarks.tenants`: what a few jobs, run one after another, say of many."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.tenant_runs import Found, of_all
from benchmarks.tenants import cells, figures
from sim.jobs import JobTimes, ServiceTimes


def found(took: list[float], first: list[float]) -> Found:
    """Jobs one after another that take so long, with their first step so long after they begin; four steps each."""
    ends = [sum(took[: n + 1]) for n in range(len(took))]
    firsts = [end - job + at for end, job, at in zip(ends, took, first, strict=True)]
    jobs = tuple(JobTimes(1.0, 0.5, job / 6, job / 5, 0.1, 0.2, 0.1) for job in took)
    times = ServiceTimes(jobs=jobs, steps=4, groups_per_step=2, running=1)
    rewards = [[0.5, 0.6]] * len(took)
    return Found(ends[-1], ends[-1], 4 * len(took), firsts, 0.1, 0.2, 0.3, rewards, ends, 1000.0, times)


def test_all_take_what_their_kinds_take_on_average() -> None:
    few = found([9, 20, 30, 11, 20, 34], [3, 5, 8, 3, 5, 8])
    all_ = of_all(few, 8)  # three of the first two kinds, two of the last
    assert all_.seconds == pytest.approx(3 * 10 + 3 * 20 + 2 * 32)
    assert all_.first_steps == pytest.approx([3, 15, 38, 65, 77, 100, 127, 139])
    assert (all_.steps, all_.measured_s, all_.engine_busy) == (32, 124, 0.1)
    assert all_.error == pytest.approx(((3 * 2**0.5) ** 2 / 2 + (2 * 8**0.5) ** 2 / 2) ** 0.5 / 154)


def test_where_all_were_run_nothing_is_derived() -> None:
    few = found([9, 20, 30], [3, 5, 8])
    assert of_all(few, 3) is few


def test_the_figures_are_of_as_many_jobs_on_both_sides() -> None:
    few = found([9, 20, 30, 11, 20, 34], [3, 5, 8, 3, 5, 8])
    ours = found([10.0] * 8, [4.0] * 8)
    ours = replace(ours, measured_s=40.0, seconds=40.0, engine_busy=0.5, trainer_busy=0.5, processors_busy=0.9)
    one = found([10.0], [4.0])
    others = {"one-by-one": of_all(few, 8), "rounds": ours, "alone": of_all(few, 8), "unmixed": ours}
    told = {figure.name: figure.value for figure in figures({1: one, 8: ours}, others, 8)}
    assert told["steps_per_hour_ratio_8"] == pytest.approx(154 / 40)
    assert told["end_to_end_reduction"] == pytest.approx(1 - 40 / 154)
    assert told["utilisation_ratio"] == pytest.approx(0.5 / 0.15)
    assert told["idle_reduction"] == pytest.approx(1 - 0.5 / 0.85)
    assert told["no_async_loss"] == told["no_multilora_loss"] == told["reward_gap"] == 0
    assert told["no_async_loss_attainable"] == pytest.approx(0.1), "the cores were at work for nine tenths of it"
    assert told["one-by-one_seconds"] == pytest.approx(154)
    assert told["one-by-one_seconds_simulated"] > 124, "of all eight, too"
    assert cells("ours", ours)[1:4] == ["40.0", "2880", "39.0"]
