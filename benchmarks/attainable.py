"""How short the steps of a mode can be, given how long the groups and the training of every single step took.

Invariants: pure; only what the order of a mode's stages demands, so no run is below it (`rl.modes` has the orders).
With L(n) the slowest group of the batch of step n, T(n) its training, e(n) the end of that, c(n) the moment at which
its batch is there:

    sync, sync_plus, rollart   e(n) >= max(e(n - 1), e(n - 1 - alpha) + L(n)) + T(n)
    one_off, six_steps         c(n) >= c(n - alpha) + L(n);   e(n) >= max(e(n - 1), c(n)) + T(n)
    areal, late: draw_again    e(n) >= e(n - 1) + T(n);   alpha + 1 batches in flight, each as long as a mean group

and no step is on average shorter than the work in it. What is before the steps that count is taken as it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rl.modes import Mode


@dataclass(frozen=True)
class StepTimes:
    """Of one step, in seconds."""

    batch: float
    """When training began, on any clock."""
    trained: float
    """When it ended."""
    groups: tuple[float, ...]
    """Of each group of the batch, from its first reset to its last reward."""

    @property
    def train_s(self) -> float:
        return self.trained - self.batch


def least_step(
    mode: Mode, alpha: int, waits: bool, before: Sequence[StepTimes], counted: Sequence[StepTimes], work_s: float
) -> float:
    """Mean seconds that the steps `counted` take at least; `before` are those before them, from version 1 on.

    `waits`: whether a step waits for groups that it would make too old; `work_s`: of a mean step, on the processors."""
    batch, trained = [s.batch for s in before], [s.trained for s in before]
    hurried = not (waits or mode.alternates)
    for n, step in enumerate(counted, start=len(before)):
        if hurried:
            there = -math.inf
        elif mode.eager or mode.alternates:
            there = _at(trained, n - 1 - alpha) + max(step.groups)
        else:
            there = _at(batch, n - alpha) + max(step.groups)
        batch.append(there)
        trained.append(max(trained[n - 1], there) + step.train_s)
    path = (trained[-1] - trained[len(before) - 1]) / len(counted)
    flow = fmean(g for step in counted for g in step.groups) / (alpha + 1) if hurried else 0.0
    return max(path, flow, work_s)


def _at(moments: Sequence[float], n: int) -> float:
    """What began before the first step is no bound."""
    return moments[n] if n >= 0 else -math.inf
