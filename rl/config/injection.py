"""Disturbances that a run adds to its environments on purpose: latency and failures.

Invariant: a draw is a pure function of the section and the generator, so that the simulator, a benchmark and a run
see the same disturbances for equal seeds.
"""

from __future__ import annotations

import math
import random
from typing import Annotated, Literal

from pydantic import Field

from rl.config.base import Section

Probability = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


class ConstantLatency(Section):
    """Always the same."""

    type: Literal["constant"] = "constant"
    seconds: NotNegative
    """Length."""

    def draw(self, rng: random.Random) -> float:
        return self.seconds


class NormalLatency(Section):
    """Around a mean; what would be negative is 0."""

    type: Literal["normal"] = "normal"
    mean: NotNegative
    """Seconds."""
    deviation: NotNegative
    """Standard deviation in seconds."""

    def draw(self, rng: random.Random) -> float:
        return max(0.0, rng.gauss(self.mean, self.deviation))


class LognormalLatency(Section):
    """Mostly short, now and then long: what services and container hosts show."""

    type: Literal["lognormal"] = "lognormal"
    median: Annotated[float, Field(gt=0)]
    """Seconds."""
    sigma: NotNegative = 1.0
    """Standard deviation of the logarithm: at 1 the 99th percentile is ten times the median."""

    def draw(self, rng: random.Random) -> float:
        return rng.lognormvariate(math.log(self.median), self.sigma)


class ParetoLatency(Section):
    """A heavy tail: at a shape of 2 or below the variance is infinite."""

    type: Literal["pareto"] = "pareto"
    least: Annotated[float, Field(gt=0)]
    """Seconds."""
    shape: Annotated[float, Field(gt=1)] = 1.5
    """Smaller is heavier."""

    def draw(self, rng: random.Random) -> float:
        return self.least * rng.paretovariate(self.shape)


Latency = Annotated[ConstantLatency | NormalLatency | LognormalLatency | ParetoLatency, Field(discriminator="type")]


class InjectionSection(Section):
    """Latency and failures added to every environment of a domain, and labelled as such wherever they show."""

    reset_latency: Latency = ConstantLatency(seconds=0)
    """Before every `reset`."""
    step_latency: Latency = ConstantLatency(seconds=0)
    """Before every `step`."""
    reset_failure: Probability = 0.0
    """Share of the calls of `reset` that fail."""
    step_failure: Probability = 0.0
    """Share of the calls of `step` that fail."""
    time_scale: NotNegative = 1.0
    """Factor on every latency; 0.01 plays a day in a quarter of an hour."""
