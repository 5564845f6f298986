"""pass@k: the chance that at least one of k samples of a problem solves it.

The unbiased estimate from n >= k samples, c of which solved it, is 1 - C(n - c, k) / C(n, k) (Chen et al. 2021,
"Evaluating Large Language Models Trained on Code", section 2.1); the mean over problems estimates the chance for a
fresh problem.

Invariant: exact in integers until the last division.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import fmean


def pass_at(k: int, solved: int, samples: int) -> float:
    """Of one problem. Raises ValueError unless 1 <= k <= samples and 0 <= solved <= samples."""
    if not 1 <= k <= samples or not 0 <= solved <= samples:
        raise ValueError(f"pass@{k} from {solved} solved of {samples} samples")
    return 1 - comb(samples - solved, k) / comb(samples, k)


def mean_pass_at(k: int, rewards: Sequence[Sequence[float]], solved_at: float) -> float:
    """Over problems, each given as the rewards of its samples; a reward of `solved_at` or more solves. Problems with
    fewer than k samples (some failed) are left out; NaN if none is left."""
    kept = [samples for samples in rewards if len(samples) >= k]
    if not kept:
        return float("nan")
    return fmean(pass_at(k, sum(r >= solved_at for r in samples), len(samples)) for samples in kept)
