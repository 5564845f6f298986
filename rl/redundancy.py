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
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

POINTS = 128
"""At which a distribution of times is looked at, if it has more."""


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


def batch_time(durations: Sequence[float], needed: int, spares: int, failure_rate: float, groups: int = 1) -> float:
    """Expected time until the last of `groups` groups of `needed` members is complete, in `replace_failures`.

    Every try takes one of the `durations` (at least one, equally likely) and fails, at its end, independently at
    `failure_rate`; a member that fails when the spares are used up is tried once more, which then succeeds.

    Raises ValueError for anything that is no duration, count or probability."""
    if not durations or needed < 1 or spares < 0 or groups < 1 or not 0 <= failure_rate <= 1:
        raise ValueError(
            f"{len(durations)} durations, {needed} needed, {spares} spares, {groups} groups, failure_rate "
            f"{failure_rate}: nothing to reckon with"
        )
    once = sorted(durations)
    twice = sorted(a + b for a, b in product(once, repeat=2))
    # (probability, members that are waited for once, and twice): by failures among those that are looked at
    cases = [
        (math.comb(needed + k - 1, k) * failure_rate**k * (1 - failure_rate) ** needed, needed + k, 0)
        for k in range(spares + 1)
    ]
    tries = needed + spares
    cases += [
        (_exactly(failed, tries, failure_rate), tries - (failed - spares), failed - spares)
        for failed in range(spares + 1, tries + 1)
    ]
    cases = [case for case in cases if case[0] > 1e-9]
    mean, reached, before = 0.0, 0.0, 0.0
    times = sorted({*once, *twice})
    for at in [*times[: -1 : max(1, len(times) // POINTS)], times[-1]]:
        mean += (1.0 - reached) * (at - before)
        p, q = bisect_right(once, at) / len(once), bisect_right(twice, at) / len(twice)
        reached, before = math.fsum(chance * p**a * q**b for chance, a, b in cases) ** groups, at
    return mean


def spares_worth(
    durations: Sequence[float], needed: int, failure_rate: float, groups: int = 1, price: float = 1.0
) -> int:
    """The spares at which time x work^price is least: with `price` 0 only time counts, with 1 a machine that does twice
    the work must make batches in half the time. Never more than as many again, nor than fail in one group of
    thousand."""
    expected = needed * failure_rate
    most = min(needed, math.ceil(expected + 3 * math.sqrt(expected * (1 - failure_rate))))

    def worth(spares: int) -> float:
        return batch_time(durations, needed, spares, failure_rate, groups) * math.pow(1 + spares / needed, price)

    return min(range(most + 1), key=worth)


def _exactly(failures: int, trials: int, rate: float) -> float:
    """Probability of so many failures."""
    return math.comb(trials, failures) * rate**failures * (1 - rate) ** (trials - failures)
