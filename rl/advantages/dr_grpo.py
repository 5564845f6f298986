"""Dr. GRPO (Liu et al. 2025, Understanding R1-Zero-like training): no division by the deviation, which would
weigh very easy and very hard problems up."""

from collections.abc import Sequence
from statistics import fmean


def advantages(rewards: Sequence[float]) -> list[float]:
    """r - mean."""
    if not rewards:
        return []
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]
