"""RLOO (Ahmadian et al. 2024, Back to basics): the baseline of a member is the mean of the others."""

from collections.abc import Sequence


def advantages(rewards: Sequence[float]) -> list[float]:
    """r_i - mean of r_j, j != i; zeros for a group of one."""
    n = len(rewards)
    if n < 2:
        return [0.0] * n
    total = sum(rewards)
    return [reward - (total - reward) / (n - 1) for reward in rewards]
