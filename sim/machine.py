"""A run on a real machine, predicted from its stage times: what its mode alone makes of them.

Groups take as long as those of that run took, one after the other in the order in which they were trained, from the
first again after the last. Training, pushing and swapping take what they took, on average. The policies of the mode
then say when what starts. No step is shorter than its work on the processors.

Invariants: pure; the step time that was measured is no input; equal times give equal predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from rl.modes import ModeName
from rl.placement import HardwareClass
from sim.config import DomainWork, Efficiency, Latency, PoolSection, Scenario, TrainerSection
from sim.profiles import language_model
from sim.simulate import simulate
from sim.workload import Workload

Array = np.ndarray
MODEL = "Qwen3-0.6B"
"""Stands for any: its own times are made negligible."""
STEPS = 150
"""At least; as many as make whole rounds of the groups."""
WARMUP = 4
NOTHING = Latency(mean=0.0)


@dataclass(frozen=True)
class StageTimes:
    """Of one run, per step, in seconds."""

    mode: ModeName
    alpha: int
    batches: tuple[tuple[float, ...], ...]
    """By step, of each of its groups: from its first reset to its last reward."""
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


class Replay(Workload):
    """Trajectories of one turn, whose environments take this long in the order in which they are asked."""

    def __init__(self, work: DomainWork, seconds: Array):
        super().__init__([work], seed=0)
        self._seconds, self._next = seconds, 0

    def steps(self, domain: Array, turns: Array) -> Array:
        at = np.arange(self._next, self._next + len(domain)) % len(self._seconds)
        self._next += len(domain)
        return self._seconds[at]


@cache
def predicted_step(times: StageTimes) -> float:
    """Seconds from one commit to the next."""
    groups = np.concatenate([np.array(batch, float) for batch in times.batches])
    per_step, typical = len(times.batches[0]), float(groups.mean())
    work = DomainWork(
        name="group", turns=(1, 1), prompt_tokens=1, observation_tokens=0, response_tokens=1, problem_spread=0,
        member_spread=0, turn_spread=0, reset=NOTHING, step=Latency(mean=typical), score=NOTHING,
    )  # fmt: skip
    size = language_model(MODEL).weight_bytes
    swap, push = max(times.swap_s, 1e-3), max(times.push_s, 1e-3)
    scenario = Scenario(
        name="machine",
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
        groups_per_step=per_step,
        group_size=1,
        steps=WARMUP + len(times.batches) * math.ceil(STEPS / len(times.batches)),
        warmup=WARMUP,
        tick=min(typical, times.train_s) / 10,
    )  # fmt: skip
    return max(simulate(scenario, Replay(work, groups)).step_s, times.work_s)


def predicted_ratios(runs: Mapping[str, StageTimes], best: str = "rollart") -> dict[str, float]:
    """By how much `best` outruns each of the others, in tokens per second: `rollart_over_sync` and so on."""
    speed = {name: times.tokens / predicted_step(times) for name, times in runs.items()}
    return {f"{best}_over_{name}": speed[best] / other for name, other in speed.items() if name != best}
