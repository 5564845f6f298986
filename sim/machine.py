"""A run on a real machine, predicted from its stage times: what its mode alone makes of them.

A group takes as long as groups of that run took, whatever it did in that time; its spread is that with which the
slowest group of a batch takes, on average, as long as the slowest ones did. Training, pushing and swapping take what
they took. The policies of the mode then say when what starts. No step is shorter than its work on the processors.

Invariants: pure; the step time that was measured is no input; equal times give equal predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl.modes import ModeName
from rl.placement import HardwareClass
from sim.config import DomainWork, Efficiency, Latency, PoolSection, Scenario, TrainerSection
from sim.profiles import language_model
from sim.simulate import simulate

MODEL = "Qwen3-0.6B"
"""Stands for any: its own times are made negligible."""
STEPS = 150
DRAWS = 20_000
NOTHING = Latency(mean=0.0)


@dataclass(frozen=True)
class StageTimes:
    """Of one run, per step, in seconds."""

    mode: ModeName
    alpha: int
    groups_per_step: int
    group_s: float
    """Of the mean group, from its first reset to its last reward."""
    slowest_s: float
    """Of the slowest group of a batch."""
    train_s: float
    push_s: float = 0.0
    """In which a version is on its way to the store."""
    swap_s: float = 0.0
    """In which the engines are updated."""
    work_s: float = 0.0
    """Of the busiest process, or of all on all cores: no step is shorter."""
    late: Literal["wait", "draw_again"] = "wait"
    tokens: float = 1.0
    """Of the mean batch, in any unit that the runs to be compared share."""


def predicted_step(times: StageTimes, seed: int = 0) -> float:
    """Seconds from one commit to the next."""
    spread = spread_of(times.group_s, times.slowest_s, times.groups_per_step)
    group = Latency(mean=times.group_s, sd=times.group_s * math.sqrt(math.expm1(spread**2)))
    work = DomainWork(
        name="group", turns=(1, 1), prompt_tokens=1, observation_tokens=0, response_tokens=1, problem_spread=0,
        member_spread=0, turn_spread=0, reset=NOTHING, step=group, score=NOTHING,
    )  # fmt: skip
    size = language_model(MODEL).weight_bytes
    swap, push = max(times.swap_s, 1e-3), max(times.push_s, 1e-3)
    scenario = Scenario(
        name="machine",
        seed=seed,
        model=MODEL,
        domains=(work,),
        pools=(PoolSection(hardware="H800", gpus=8, hardware_class=HardwareClass.COMPUTE_GPU),),
        trainer=TrainerSection(gpus=1024),
        efficiency=Efficiency(
            iteration=1e-4, train=1.0, train_fixed=times.train_s, pull_hidden=0.0, pull_bandwidth=size / swap,
            push_bandwidth=size / push,
        ),
        alpha=times.alpha,
        # environments of a stepped run take their turns together, which is in its times already
        mode="sync_plus" if times.mode == "sync" else times.mode,
        late=times.late,
        groups_per_step=times.groups_per_step,
        group_size=1,
        steps=STEPS,
        warmup=4,
        tick=min(times.group_s, times.train_s) / 10,
    )  # fmt: skip
    return max(simulate(scenario).step_s, times.work_s)


def predicted_ratios(runs: Mapping[str, StageTimes], best: str = "rollart") -> dict[str, float]:
    """By how much `best` outruns each of the others, in tokens per second: `rollart_over_sync` and so on."""
    speed = {name: times.tokens / predicted_step(times) for name, times in runs.items()}
    return {f"{best}_over_{name}": speed[best] / other for name, other in speed.items() if name != best}


def spread_of(mean: float, slowest: float, count: int) -> float:
    """Sigma of the lognormal of this mean of which `count` draws have the largest at `slowest`, on average."""
    normal = np.sort(np.random.default_rng(0).standard_normal((DRAWS // count + 1, count)), axis=1)[:, -1]
    low, high = 0.0, 4.0
    for _ in range(40):
        middle = (low + high) / 2
        largest = float(np.exp(middle * normal - middle**2 / 2).mean())
        low, high = (middle, high) if largest * mean < slowest else (low, middle)
    return low
