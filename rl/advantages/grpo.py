"""GRPO (Shao et al. 2024, DeepSeekMath, section 4.1): rewards normalised by group mean and deviation."""

from collections.abc import Sequence
from statistics import fmean, stdev


def advantages(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-4), with the sample deviation, as TRL does; zeros for a group of one."""
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    mean, deviation = fmean(rewards), stdev(rewards)
    return [(reward - mean) / (deviation + 1e-4) for reward in rewards]
