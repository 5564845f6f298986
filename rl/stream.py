"""The problem stream: ordinal -> (domain, index, seed), a pure function of the configuration.

Invariants
- The same seed and weights give the same stream, in any process, for ever: only sha256 and integers decide.
- After n draws the number of problems of a domain differs from its share of n by less than one.
- A training problem and a held-out problem never share a seed, and environments split their problem space
  by `Problem.split` (see `envs/protocol.py`).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

from rl.trajectory import Problem


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts; equal parts give equal seeds."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class ProblemStream:
    """Draws problems in order; `problem(n)` may be asked in any order and always answers the same."""

    def __init__(self, seed: int, weights: Mapping[str, float]):
        if not weights or any(weight <= 0 for weight in weights.values()):
            raise ValueError(f"domain weights must be positive: {dict(weights)}")
        exact = {name: Fraction(weight) for name, weight in sorted(weights.items())}
        scale = math.lcm(*(weight.denominator for weight in exact.values()))
        self._seed = seed
        self._weights = {name: int(weight * scale) for name, weight in exact.items()}
        self._total = sum(self._weights.values())
        all_weights = math.lcm(*self._weights.values())
        self._spacing = {name: all_weights // weight for name, weight in self._weights.items()}
        """Between two problems of a domain, in whole parts of one draw."""
        self._drawn: list[tuple[str, int]] = []
        self._counts = dict.fromkeys(self._weights, 0)

    def problem(self, ordinal: int) -> Problem:
        """The problem of this ordinal (>= 0), of the training split."""
        domain, index = self._draw(ordinal)
        return Problem(ordinal, domain, index, derive_seed(self._seed, "train", domain, index))

    def domain(self, ordinal: int) -> str:
        """The domain of this ordinal's problem."""
        return self._draw(ordinal)[0]

    def mix(self, start: int, count: int) -> Mapping[str, int]:
        """How many of the `count` problems from ordinal `start` on are of each domain."""
        return Counter(map(self.domain, range(start, start + count)))

    def _draw(self, ordinal: int) -> tuple[str, int]:
        """Domain and index within it."""
        while len(self._drawn) <= ordinal:
            name = self._next()
            self._drawn.append((name, self._counts[name]))
            self._counts[name] += 1
        return self._drawn[ordinal]

    def _next(self) -> str:
        """Of the domains below their share, the one whose next problem is due first: the quota method
        (Balinski, Young 1975). Taking the one furthest below its share instead drifts by more than one."""
        n = len(self._drawn) + 1
        below = [k for k, w in self._weights.items() if w * n > self._total * self._counts[k]]
        return min(below, key=lambda k: ((self._counts[k] + 1) * self._spacing[k], k))

    def held_out(self, domain: str, count: int) -> list[Problem]:
        """The first `count` held-out problems of a domain; they depend on the domain alone, not on the run's
        seed, so that evaluations of different runs compare."""
        return [Problem(i, domain, i, derive_seed("heldout", domain, i), "heldout") for i in range(count)]
