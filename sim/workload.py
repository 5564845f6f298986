"""Draws what trajectories will do: turns, tokens, latencies, failures.

Invariants: everything comes from one generator that is seeded by the scenario, in the order of the draws, so equal
scenarios give equal runs; lognormals have the mean that the scenario names. What is drawn at every turn comes from
tables of `TABLE` draws made at the start, which costs a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np

from rl.stream import derive_seed
from sim.config import DomainWork, Latency

Array = np.ndarray
TABLE = 2**16
_NORMAL = NormalDist()


class Workload:
    """The domains of a scenario as arrays; a domain is its index."""

    def __init__(self, domains: Sequence[DomainWork], seed: int, at_once: int = 1):
        """`at_once`: turns that are drawn together, at most."""
        self.random = np.random.default_rng(seed)
        self.domains = tuple(domains)
        self._at_once = at_once
        self.index = {d.name: at for at, d in enumerate(domains)}

        def column(of: Callable[[DomainWork], float]) -> Array:
            return np.array([of(d) for d in domains], float)

        self.fewest = column(lambda d: d.turns[0]).astype(int)
        self.most = column(lambda d: d.turns[1]).astype(int)
        self.prompt = column(lambda d: d.prompt_tokens)
        self.observation = column(lambda d: d.observation_tokens)
        self.response = column(lambda d: d.response_tokens)
        self.member_spread = column(lambda d: d.member_spread)
        self.turn_spread = column(lambda d: d.turn_spread)
        self.longest = column(lambda d: d.max_tokens)
        self.missed = column(lambda d: 1.0 - d.prefix_hit)
        self.failure = column(lambda d: d.failure)
        self._reset = self._table([d.reset for d in domains])
        self._score = self._table([d.score for d in domains])
        self._step = self._sums([self._table([d.step for d in domains]) for _ in range(at_once)])
        spreads = np.repeat(self.turn_spread, TABLE)
        self._turns = self._sums([self._around_one(spreads) for _ in range(at_once)])

    def members(self, domain: Array, problem: Array) -> tuple[Array, Array, Array]:
        """Of new trajectories: turns, mean tokens per response, and the turn at which they fail (beyond the last
        one for those that do not)."""
        turns = self.random.integers(self.fewest[domain], self.most[domain] + 1)
        length = self.response[domain] * problem * self._around_one(self.member_spread[domain])
        fails = self.random.random(len(domain)) < self.failure[domain]
        at = self.random.integers(1, turns + 1)
        return turns, length, np.where(fails, at, turns + 1)

    def responses(self, domain: Array, length: Array, turns: Array) -> Array:
        """Tokens of the responses of so many turns each."""
        return np.maximum(1.0, length * self._look_up(self._turns, self._row(domain, turns)))

    def resets(self, domain: Array) -> Array:
        return self._look_up(self._reset, domain)

    def steps(self, domain: Array, turns: Array) -> Array:
        """Of so many turns each."""
        return self._look_up(self._step, self._row(domain, turns))

    def scores(self, domain: Array) -> Array:
        return self._look_up(self._score, domain)

    def _row(self, domain: Array, turns: Array) -> Array:
        return domain if self._at_once == 1 else (turns - 1) * len(self.domains) + domain

    def _look_up(self, table: Array, row: Array) -> Array:
        return table[row * TABLE + self.random.integers(0, TABLE, len(row))]

    @staticmethod
    def _sums(draws: Sequence[Array]) -> Array:
        """Tables of one draw, of the sum of two, and so on."""
        return np.cumsum(draws, axis=0).ravel()

    def _around_one(self, sigma: Array) -> Array:
        return np.exp(sigma * self.random.standard_normal(len(sigma)) - sigma**2 / 2)

    def _table(self, latencies: Sequence[Latency]) -> Array:
        return np.concatenate([self._draw(one) for one in latencies])

    def _draw(self, one: Latency) -> Array:
        """`TABLE` draws."""
        if one.mean == 0:
            spread = np.zeros(TABLE)
        elif one.shape == "normal":
            spread = np.maximum(0.0, self.random.normal(one.mean, one.sd, TABLE))
        else:
            spread = one.mean * self._around_one(np.full(TABLE, np.sqrt(np.log1p((one.sd / one.mean) ** 2))))
        long = self.random.random(TABLE) < one.tail_share
        return spread + long * self.random.exponential(1.0, TABLE) * one.tail_mean


def length_factor(spread: float, *problem: object) -> float:
    """How much longer than usual the responses to a problem are: lognormal, and the same at every attempt."""
    if not spread:
        return 1.0
    z = _NORMAL.inv_cdf((derive_seed(*problem) + 0.5) / 2**63)
    return math.exp(spread * z - spread**2 / 2)


def shortest_turn(domains: Sequence[DomainWork], seconds_per_token: float) -> float:
    """About the shortest time that a turn of any domain takes, on an engine of this speed."""
    return min(d.response_tokens * seconds_per_token + d.step.mean for d in domains)
