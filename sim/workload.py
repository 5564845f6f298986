"""Draws what trajectories will do: turns, tokens, latencies, failures.

Invariants: everything comes from one generator that is seeded by the scenario, in the order of the draws, so equal
scenarios give equal runs; lognormals have the mean that the scenario names. What is drawn at every turn comes from
tables of `TABLE` draws made at the start, which costs a tenth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sim.config import DomainWork, Latency

Array = np.ndarray
TABLE = 2**16


class Workload:
    """The domains of a scenario as arrays; a domain is its index."""

    def __init__(self, domains: Sequence[DomainWork], seed: int):
        self.random = np.random.default_rng(seed)
        self.domains = tuple(domains)
        self.index = {d.name: at for at, d in enumerate(domains)}

        def column(of: Callable[[DomainWork], float]) -> Array:
            return np.array([of(d) for d in domains], float)

        self.fewest = column(lambda d: d.turns[0]).astype(int)
        self.most = column(lambda d: d.turns[1]).astype(int)
        self.prompt = column(lambda d: d.prompt_tokens)
        self.observation = column(lambda d: d.observation_tokens)
        self.response = column(lambda d: d.response_tokens)
        self.problem_spread = column(lambda d: d.problem_spread)
        self.member_spread = column(lambda d: d.member_spread)
        self.turn_spread = column(lambda d: d.turn_spread)
        self.longest = column(lambda d: d.max_tokens)
        self.missed = column(lambda d: 1.0 - d.prefix_hit)
        self.failure = column(lambda d: d.failure)
        self._reset = self._table([d.reset for d in domains])
        self._step = self._table([d.step for d in domains])
        self._score = self._table([d.score for d in domains])
        spreads = np.repeat(self.turn_spread, TABLE)
        self._turns = self._around_one(spreads)

    def problems(self, domain: Array) -> Array:
        """How much longer than usual the responses to each problem are."""
        return self._around_one(self.problem_spread[domain])

    def members(self, domain: Array, problem: Array) -> tuple[Array, Array, Array]:
        """Of new trajectories: turns, mean tokens per response, and the turn at which they fail (beyond the last
        one for those that do not)."""
        turns = self.random.integers(self.fewest[domain], self.most[domain] + 1)
        length = self.response[domain] * problem * self._around_one(self.member_spread[domain])
        fails = self.random.random(len(domain)) < self.failure[domain]
        at = self.random.integers(1, turns + 1)
        return turns, length, np.where(fails, at, turns + 1)

    def responses(self, domain: Array, length: Array) -> Array:
        """Tokens of one response each."""
        return np.maximum(1.0, length * self._look_up(self._turns, domain))

    def resets(self, domain: Array) -> Array:
        return self._look_up(self._reset, domain)

    def steps(self, domain: Array) -> Array:
        return self._look_up(self._step, domain)

    def scores(self, domain: Array) -> Array:
        return self._look_up(self._score, domain)

    def _look_up(self, table: Array, domain: Array) -> Array:
        return table[domain * TABLE + self.random.integers(0, TABLE, len(domain))]

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


def shortest_turn(domains: Sequence[DomainWork], seconds_per_token: float) -> float:
    """About the shortest time that a turn of any domain takes, on an engine of this speed."""
    return min(d.response_tokens * seconds_per_token + d.step.mean for d in domains)
