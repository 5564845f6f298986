"""The jobs of a service on a real machine, predicted from their stage times: what places, queue, rounds and the bounds
on staleness make of them.

    submitted -> place -> begins -> (ready -> rollout of the batch -> gathered -> queue -> trained -> pushed) ...

Invariants: pure; neither the time that all took nor any wait in the trainers' queue is an input; equal times give
equal predictions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np

from rl.modes import default_mode
from rl.placement import HardwareClass
from sim.cluster import Cluster
from sim.config import (
    DomainWork,
    Efficiency,
    Latency,
    PoolSection,
    RewardSection,
    Scenario,
    TenantSection,
    TrainerSection,
)
from sim.machine import MODEL, NOTHING
from sim.profiles import language_model
from sim.simulate import LONGEST

SEEDS = 6
"""Runs that a prediction is the mean of, where anything is drawn."""
TICKS = 10
"""Of the shortest stage that a tick has to be shorter than."""
DRAWS = 20_000


@dataclass(frozen=True)
class JobTimes:
    """Of one job, in seconds, each the mean over its steps."""

    begins_s: float
    """From its place to the first group of its first batch."""
    ready_s: float
    """From a commit to the first group under the new version."""
    group_s: float
    """Of the mean group, from its first reset to its last reward."""
    rollout_s: float
    """Of a batch: from its first group's start to its last group's end."""
    gather_s: float
    """From the last reward of a batch until it is in the trainers' queue."""
    train_s: float
    """Restoring included."""
    push_s: float
    """From the step until its record stands."""


@dataclass(frozen=True)
class ServiceTimes:
    """Of the jobs that were handed in at once, and how the service ran them."""

    jobs: tuple[JobTimes, ...]
    steps: int
    """Of each job."""
    groups_per_step: int
    alpha: int = 0
    running: int | None = None
    schedule: Literal["free", "rounds"] = "free"


def predicted_seconds(times: ServiceTimes, seeds: Sequence[int] = range(SEEDS)) -> float:
    """From the submission to the last commit of all."""
    seeds = seeds if times.alpha else seeds[:1]
    return fmean(_once(_scenario(times, seed), times.steps) for seed in seeds)


def _once(scenario: Scenario, steps: int) -> float:
    cluster = Cluster(scenario, steps)
    cluster.simulate(LONGEST)
    return max(run.steps[-1].committed for run in cluster.runs)


def _scenario(times: ServiceTimes, seed: int) -> Scenario:
    jobs = times.jobs
    train, push = fmean(job.train_s for job in jobs), fmean(job.push_s for job in jobs)
    # in rounds it holds the wait for the others, of which the last one has none
    ready = (fmean if times.schedule == "free" else min)([job.ready_s for job in jobs])
    size = language_model(MODEL).weight_bytes
    return Scenario(
        name="jobs",
        seed=seed,
        model=MODEL,
        domains=tuple(_work(job, number, times) for number, job in enumerate(jobs)),
        pools=(
            PoolSection(
                hardware="H800", gpus=8, hardware_class=HardwareClass.COMPUTE_GPU,
                max_sequences=len(jobs) * times.groups_per_step * 4,
            ),
        ),
        trainer=TrainerSection(gpus=1024),
        reward=RewardSection(cold_start=0.0),
        efficiency=Efficiency(
            iteration=1e-4, train=1.0, train_fixed=train, adapter_swap=ready, adapter_push=push, adapters=0.0,
            pull_hidden=0.0, pull_bandwidth=size / ready, push_bandwidth=size / push,
        ),
        alpha=times.alpha,
        mode=default_mode(times.alpha),
        tenants=len(jobs),
        shares=tuple(
            TenantSection(domains=(f"job-{number}",), begins=job.begins_s) for number, job in enumerate(jobs)
        ),
        running=times.running,
        schedule=times.schedule,
        groups_per_step=times.groups_per_step,
        group_size=1,
        steps=times.steps,
        warmup=0,
        tick=min(train, *(job.group_s for job in jobs)) / TICKS,
    )  # fmt: skip


def _work(job: JobTimes, number: int, times: ServiceTimes) -> DomainWork:
    """Where rollout and training take turns only the batch as a whole counts, whose groups may have begun one after
    another; else some groups are ready before others."""
    group = Latency(mean=job.rollout_s)
    if times.alpha:
        spread = spread_of(job.group_s, job.rollout_s, times.groups_per_step)
        group = Latency(mean=job.group_s, sd=job.group_s * math.sqrt(math.expm1(spread**2)))
    return DomainWork(
        name=f"job-{number}", turns=(1, 1), prompt_tokens=1, observation_tokens=0, response_tokens=1, problem_spread=0,
        member_spread=0, turn_spread=0, reset=NOTHING, step=group, score=Latency(mean=job.gather_s),
    )  # fmt: skip


def spread_of(mean: float, slowest: float, count: int) -> float:
    """Sigma of the lognormal of this mean of which `count` draws have the largest at `slowest`, on average."""
    normal = np.sort(np.random.default_rng(0).standard_normal((DRAWS // count + 1, count)), axis=1)[:, -1]
    low, high = 0.0, 4.0
    for _ in range(40):
        middle = (low + high) / 2
        largest = float(np.exp(middle * normal - middle**2 / 2).mean())
        low, high = (middle, high) if largest * mean < slowest else (low, middle)
    return low
