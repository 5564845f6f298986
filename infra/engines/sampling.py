"""Batched sampling by inverse transform: one uniform per row, a pure function of (seed, position).

Invariants
- A row's token depends on its own logits, temperature, seed and position alone, never on its batch mates.
- The returned log-prob is that of the very distribution that was drawn from: float32 log-softmax after
  temperature; a token of probability 0 is never drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_BITS = 40


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """float64 in (0, 1), one per row: the splitmix64 finalizer over seed and position
    (Steele, Lea and Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        x = np.array([seed & (2**64 - 1) for seed in seeds], dtype=np.uint64)
        for _ in range(2):  # the first round decorrelates neighbouring seeds before the position enters
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x ^= x >> np.uint64(31)
            x += np.array(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return ((x >> np.uint64(64 - _BITS)).astype(np.float64) + 0.5) / 2.0**_BITS


def draw(logits: torch.Tensor, temperatures: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their log-probs, both (n,), from logits (n, vocabulary); `temperatures` (n,) float32 > 0,
    `u` (n,) float64 in (0, 1)."""
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    cdf = logprobs.double().exp_().cumsum_(dim=-1)
    # right=True takes the first index whose cdf exceeds the target, so its own probability is above 0
    tokens = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True)
    tokens.clamp_(max=logits.shape[-1] - 1)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]
