"""Tokens with their provenance, in the order in which the policy sees them.

Invariant: a token that was sampled has mask 1 with its version and log-prob; every other one has mask 0, log-prob 0.0
and `NO_VERSION`. The four columns have one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rl.trajectory import NO_VERSION


def versions_of(spans: Sequence[tuple[int, int]], tokens: int) -> list[int]:
    """The version of each of so many sampled tokens; `spans` are (index of the first token, version), ascending."""
    found: list[int] = []
    for (start, version), (end, _) in pairwise([*spans, (tokens, NO_VERSION)]):
        found += [version] * (end - start)
    return found


@dataclass(slots=True)
class Recorder:
    """Grows at its end only."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def observed(self, token_ids: Sequence[int]) -> None:
        n = len(token_ids)
        self.token_ids += token_ids
        self.loss_mask += [0] * n
        self.logprobs += [0.0] * n
        self.versions += [NO_VERSION] * n

    def sampled(self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.loss_mask += [1] * len(token_ids)
        self.logprobs += logprobs
        self.versions += versions
