"""Redundant rollout: how much more to start than is needed, and which of it counts (RollArt, section 6).

Two modes, which must not be confused:

- `replace_failures`: members beyond the needed ones are spares. A group takes its first `needed` members *by number*
  that did not fail, so a spare counts only in place of one that failed, and what is trained has the lengths of what
  was asked for.
- `first_finished`: a group takes whatever finishes first, and the rest is ended. It is quicker, and it prefers short
  trajectories: what is trained is biased, and the problems that are ended are given up under the name `surplus`
  (`rl.selection`): drawn again they would be the slowest of the next batch, too, until there is nothing else.

Invariants: pure; a group is complete only with exactly `needed` members; in `replace_failures` the choice depends on
no duration; with no failures seen and no wish for speed nothing is started in excess.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """Which of the members that were started count."""

    REPLACE_FAILURES = "replace_failures"
    FIRST_FINISHED = "first_finished"


@dataclass(frozen=True)
class RedundancyPolicy:
    """`extra_members` are started beyond the size of a group, `extra_groups` beyond the groups of a step."""

    mode: Mode = Mode.REPLACE_FAILURES
    extra_members: int = 0
    extra_groups: int = 0

    def __post_init__(self) -> None:
        if self.extra_members < 0 or self.extra_groups < 0:
            raise ValueError(f"impossible redundancy: {self}")
        if self.extra_groups and self.mode is Mode.REPLACE_FAILURES:
            raise ValueError(
                f"extra_groups ({self.extra_groups}) prefer groups that finish early; set them to 0 or the mode to "
                f"{Mode.FIRST_FINISHED}"
            )

    def chosen(self, needed: int, finished: Sequence[int], failed: Collection[int]) -> list[int] | None:
        """The members that make the group; None while it is not complete.

        `finished` are the numbers of those that finished, in the order in which they did; `failed` of those that
        will not be tried again. Members are numbered from 0; the first `needed` are no spares."""
        if self.mode is Mode.FIRST_FINISHED:
            return sorted(finished[:needed]) if len(finished) >= needed else None
        standing = [m for m in range(needed + self.extra_members) if m not in failed][:needed]
        return standing if len(standing) == needed and set(standing) <= set(finished) else None

    def hopeless(self, failed: Collection[int]) -> bool:
        """Whether so many members failed that the group can not become complete."""
        return len(failed) > self.extra_members

    def examined(self, groups_per_step: int, examined_per_step: int) -> int:
        """Groups to look at for one step, for `rl.staleness.StalenessPolicy`."""
        return max(examined_per_step, groups_per_step + self.extra_groups)


def spares_needed(needed: int, failure_rate: float, assurance: float = 0.99, most: int = 64) -> int:
    """The fewest spares with which `needed` members succeed with probability `assurance`, when each fails
    independently at `failure_rate`; at most `most`. The spare is what `replace_failures` starts ahead, so that a
    failed member costs no second run after the first.

    Raises ValueError for a rate outside 0..1 or an assurance outside 0..1."""
    if not 0 <= failure_rate <= 1 or not 0 < assurance < 1:
        raise ValueError(f"failure_rate ({failure_rate}) and assurance ({assurance}) are probabilities")
    for spares in range(most):
        if _at_most(spares, needed + spares, failure_rate) >= assurance:
            return spares
    return most


@dataclass(frozen=True)
class Gain:
    """What `first_finished` with some extra would bring."""

    extra: int
    time: float
    """Expected time of a batch, over that without extra."""
    work: float
    """Trajectories started, over those needed."""


def first_finished_gain(durations: Sequence[float], needed: int, extra: int) -> Gain:
    """From observed `durations` (at least one): of `needed + extra` independent draws the `needed`-th to finish is
    awaited, instead of the last of `needed`. Exact for the empirical distribution."""
    if not durations or needed < 1 or extra < 0:
        raise ValueError(f"{len(durations)} durations, {needed} needed, {extra} extra: nothing to reckon with")
    alone = _expected_order(durations, needed, needed)
    return Gain(extra, _expected_order(durations, needed, needed + extra) / alone, (needed + extra) / needed)


def extra_worth(durations: Sequence[float], needed: int, most: int, price: float = 1.0) -> int:
    """The extra, up to `most`, at which time x work^price is least: with `price` 0 only time counts, with 1 a machine
    that is twice as busy must make batches in half the time."""
    gains = (first_finished_gain(durations, needed, extra) for extra in range(most + 1))
    return min(gains, key=lambda gain: (gain.time * gain.work**price, gain.extra)).extra


def _at_most(failures: int, trials: int, rate: float) -> float:
    """Probability of at most so many failures."""
    if rate in (0.0, 1.0):
        return float(rate == 0.0 or failures >= trials)
    log, co_log, all_ways = math.log(rate), math.log1p(-rate), math.lgamma(trials + 1)
    terms = (
        math.exp(all_ways - math.lgamma(k + 1) - math.lgamma(trials - k + 1) + k * log + (trials - k) * co_log)
        for k in range(min(failures, trials) + 1)
    )
    return min(1.0, math.fsum(terms))


def _expected_order(durations: Sequence[float], rank: int, draws: int) -> float:
    """Mean of the `rank`-th smallest of so many draws from the durations, with replacement."""
    ordered = sorted(durations)
    n = len(ordered)
    mean, reached = 0.0, 0.0
    for at, value in enumerate(ordered, 1):
        beyond = 1.0 - _at_most(rank - 1, draws, at / n)  # at least `rank` of them are among the first `at`
        mean += value * (beyond - reached)
        reached = beyond
    return mean
