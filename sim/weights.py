"""A version on its way from the trainer to the engines: how long, and how much of it stops generation.

Invariants: `exposed` is never above `inline`; pure functions of the model and the fitted speeds.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.config import Efficiency
from sim.profiles import LanguageModel

GIB = 2**30
BUCKET = GIB
"""Weights travel in buckets of about this size."""


@dataclass(frozen=True)
class WeightTimes:
    """Seconds of the ways in which one version can travel."""

    tcp: float
    """From the store to the engines over TCP, in one piece."""
    rdma: float
    push: float
    """From the trainer to the store."""
    exposed_pull: float
    """What an overlapped pull still stops generation for."""

    @property
    def inline(self) -> float:
        """Pushed, then pulled, while everything stands still."""
        return self.push + self.tcp


def weight_times(model: LanguageModel, fitted: Efficiency) -> WeightTimes:
    """Of one version of a model. No pull is below the time of its last bucket."""
    size = model.weight_bytes
    last = min(size, BUCKET) / fitted.pull_bandwidth
    return WeightTimes(
        tcp=size / fitted.tcp_bandwidth,
        rdma=fitted.rdma_fixed + size / fitted.rdma_bandwidth,
        push=size / fitted.push_bandwidth,
        exposed_pull=max(last, size / fitted.pull_bandwidth - fitted.pull_hidden),
    )
