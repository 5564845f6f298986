"""Decoupled, truncated off-policy correction, and what it says about the mismatch.

The proximal policy is the policy at the start of the step. A step makes one update per window, so its log-probs
are the (detached) ones of the loss's own forward pass: no pass of its own is spent on them. The token's
advantage is multiplied by min(exp(proximal - behaviour), cap) (truncated importance sampling, as in AReaL's
decoupled objective, arXiv 2505.24298, section 5.2), while the loss's own clipped ratio is to the proximal policy.

Invariant: every figure is a sum or a maximum over sampled tokens, so that it does not depend on micro-batches
or ranks; only `summary` divides.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

SUMS = ("tokens", "k1", "k3", "ratio", "ratio_squared", "capped", "entropy", "fresh")
MAXIMA = ("ratio_max", "gap_max", "fresh_gap_max")


def weights(
    proximal: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor, cap: float | None
) -> torch.Tensor:
    """Factor (B, T) on each token's advantage; 1 where the mask is 0. `cap` None trusts the behaviour policy."""
    if cap is None:
        return torch.ones_like(proximal)
    return ((proximal - behaviour) * mask).exp().clamp(max=cap)


class Statistics:
    """Accumulates over the micro-batches of one window."""

    def __init__(self, device: torch.device | str) -> None:
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(len(MAXIMA), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self,
        proximal: torch.Tensor,
        behaviour: torch.Tensor,
        mask: torch.Tensor,
        fresh: torch.Tensor,
        entropy: torch.Tensor,
        cap: float | None,
    ) -> None:
        """Everything (B, T): log-probs, loss mask, tokens of the step's own base version, entropies."""
        m = mask.double()
        gap = (proximal.double() - behaviour.double()) * m
        ratio = gap.exp() * m
        over = (ratio > cap) if cap is not None else torch.zeros_like(ratio, dtype=torch.bool)
        k3 = (gap.exp() - 1 - gap) * m
        new = m * fresh
        self.sums += torch.stack(
            [
                m.sum(),
                -gap.sum(),
                k3.sum(),
                ratio.sum(),
                ratio.square().sum(),
                over.sum(),
                (entropy.double() * m).sum(),
                new.sum(),
            ]
        )
        top = torch.stack([ratio.max(), gap.abs().max(), (gap.abs() * new).max()])
        self.maxima = torch.maximum(self.maxima, top)


def summary(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """The figures of a whole window:

    mismatch_kl_k1, mismatch_kl   KL(behaviour || proximal) per token, k1 and k3 estimators (Schulman 2020)
    ratio_mean, ratio_max         importance ratio before the cap
    ess                           its effective sample size over the number of tokens, in (0, 1]
    capped_fraction               tokens whose ratio was cut
    logprob_gap_max               largest |proximal - behaviour|
    fresh_gap_max                 the same over tokens that the step's own base version sampled (absent if none):
                                  pure numerics, invariant 5
    entropy                       of the policy, per sampled token
    """
    n = max(1.0, sums["tokens"])
    figures = {
        "mismatch_kl_k1": sums["k1"] / n,
        "mismatch_kl": sums["k3"] / n,
        "ratio_mean": sums["ratio"] / n,
        "ratio_max": maxima["ratio_max"],
        "ess": sums["ratio"] ** 2 / (n * sums["ratio_squared"]) if sums["ratio_squared"] else 1.0,
        "capped_fraction": sums["capped"] / n,
        "logprob_gap_max": maxima["gap_max"],
        "entropy": sums["entropy"] / n,
        "tokens": sums["tokens"],
    }
    if sums["fresh"]:
        figures["fresh_gap_max"] = maxima["fresh_gap_max"]
    return figures
