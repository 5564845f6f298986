"""What in a run's figures calls for a look.

    reward_collapse      the reward fell from its best by `reward_drop` of all that it had gained, beyond noise
    entropy_collapse     the policy's entropy fell to `entropy_share` of what it began with, and the reward is past its
                         best: it explores no more and did not get there
    reward_hacking       suspected: the training reward rises while the held-out reward, or one part of the reward,
                         falls by `opposed_drop` of all that it ever moved
    logprob_mismatch     the log-probs of engine and trainer drift apart: the KL between them is above `mismatch_kl`,
                         and twice what it began with

Means are over `window` steps, noise is told by the differences of neighbouring steps, and a rule says nothing before
it has seen two windows.

Invariants: pure; the same history gives the same alerts, each rule at most one; an alert says since which version, and
what it saw. It never ends a run: it is for people.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import fmean

BEYOND_NOISE = 5.0
"""Standard errors of the difference of two means."""
PART = "reward/"
WATCHED = frozenset({"reward", "entropy", "mismatch_kl"})
"""With the parts of the reward, the figures of a step that a rule looks at."""


class Kind(StrEnum):
    REWARD_COLLAPSE = "reward_collapse"
    ENTROPY_COLLAPSE = "entropy_collapse"
    REWARD_HACKING = "reward_hacking"
    LOGPROB_MISMATCH = "logprob_mismatch"


@dataclass(frozen=True)
class Alert:
    """One rule that holds now. `version` is the last one that it looked at."""

    kind: Kind
    version: int
    what: str

    def __str__(self) -> str:
        return f"{self.kind.replace('_', ' ')} at version {self.version}: {self.what}"


@dataclass(frozen=True)
class Rules:
    """The thresholds (`rl.config.alerts` says what each means)."""

    window: int = 5
    reward_drop: float = 0.5
    entropy_share: float = 0.1
    opposed_drop: float = 0.3
    mismatch_kl: float = 0.05


@dataclass(frozen=True)
class Point:
    """The figures of one step, as its record has them."""

    version: int
    metrics: Mapping[str, float]


def watched(metrics: Mapping[str, float]) -> dict[str, float]:
    """What of a step's figures has to be kept to look at it later."""
    return {name: value for name, value in metrics.items() if name in WATCHED or name.startswith(PART)}


@dataclass(frozen=True)
class HeldOut:
    """The mean held-out reward of one version."""

    version: int
    reward: float


def alerts(
    points: Sequence[Point], held_out: Sequence[HeldOut], rules: Rules, domains: Collection[str] = ()
) -> list[Alert]:
    """What holds after these steps of the live line, in their order. `domains`: names that are no parts of a reward."""
    found = (
        _reward_collapse(points, rules),
        _entropy_collapse(points, rules),
        _held_out_falls(points, held_out, rules) or _part_falls(points, rules, domains),
        _mismatch(points, rules),
    )
    return [alert for alert in found if alert is not None]


class _Series:
    """One figure over the steps that have it."""

    def __init__(self, points: Sequence[Point], name: str, window: int):
        self.window = window
        self.values = [p.metrics[name] for p in points if math.isfinite(p.metrics.get(name, math.nan))]
        self.enough = len(self.values) >= 2 * window

    @property
    def first(self) -> float:
        return fmean(self.values[: self.window])

    @property
    def last(self) -> float:
        return fmean(self.values[-self.window :])

    @property
    def means(self) -> list[float]:
        """Of every window before the last one."""
        ends = range(self.window, len(self.values) - self.window + 1)
        return [fmean(self.values[end - self.window : end]) for end in ends]

    @property
    def gained(self) -> float:
        """From the lowest to the highest mean."""
        means = [*self.means, self.last]
        return max(means) - min(means)

    @property
    def noise(self) -> float:
        """Of the difference of two means of `window` steps."""
        differences = [(b - a) ** 2 / 2 for a, b in pairwise(self.values)]
        return math.sqrt(2 * fmean(differences) / self.window)

    def fell(self, share: float) -> bool:
        """Whether it is below its best by `share` of what it ever gained, and beyond noise."""
        fall = max(self.means) - self.last
        return fall > BEYOND_NOISE * self.noise and fall >= share * self.gained > 0

    @property
    def rose(self) -> bool:
        return self.last - self.means[-1] > BEYOND_NOISE * self.noise or (
            self.last - self.first > BEYOND_NOISE * self.noise and self.last >= max(self.means)
        )


def _reward_collapse(points: Sequence[Point], rules: Rules) -> Alert | None:
    reward = _Series(points, "reward", rules.window)
    if not reward.enough or not reward.fell(rules.reward_drop):
        return None
    what = (
        f"the reward fell from {max(reward.means):.3f} to {reward.last:.3f} (means of {rules.window} steps); an "
        f"earlier version can be made the head again (`rollmill versions rollback`)"
    )
    return Alert(Kind.REWARD_COLLAPSE, points[-1].version, what)


def _entropy_collapse(points: Sequence[Point], rules: Rules) -> Alert | None:
    entropy, reward = (_Series(points, name, rules.window) for name in ("entropy", "reward"))
    if not entropy.enough or not reward.enough or entropy.first <= 0:
        return None
    if entropy.last >= rules.entropy_share * entropy.first or reward.last >= max(reward.means) - reward.noise:
        return None
    what = (
        f"the entropy is {entropy.last:.3g} nats per token, and was {entropy.first:.3g}; the reward is "
        f"{reward.last:.3f} and was {max(reward.means):.3f}: the policy explores no more (training.learning_rate, "
        f"epsilon_high, kl_beta)"
    )
    return Alert(Kind.ENTROPY_COLLAPSE, points[-1].version, what)


def _held_out_falls(points: Sequence[Point], held_out: Sequence[HeldOut], rules: Rules) -> Alert | None:
    reward = _Series(points, "reward", rules.window)
    if not reward.enough or len(held_out) < 2:
        return None
    ordered = sorted(held_out, key=lambda e: e.version)
    best, last = max(ordered[:-1], key=lambda e: e.reward), ordered[-1]
    then = [p.metrics["reward"] for p in points if p.version <= max(best.version, points[0].version) and "reward" in
            p.metrics][-rules.window :]  # fmt: skip
    risen = bool(then) and reward.last - fmean(then) > BEYOND_NOISE * reward.noise
    if not risen or best.reward - last.reward < rules.opposed_drop * reward.gained:
        return None
    what = (
        f"suspected: the held-out reward fell from {best.reward:.3f} (version {best.version}) to {last.reward:.3f} "
        f"(version {last.version}), while the training reward rose from {fmean(then):.3f} to {reward.last:.3f}"
    )
    return Alert(Kind.REWARD_HACKING, points[-1].version, what)


def _part_falls(points: Sequence[Point], rules: Rules, domains: Collection[str]) -> Alert | None:
    reward = _Series(points, "reward", rules.window)
    if not reward.enough or not reward.rose:
        return None
    names = sorted({n for p in points for n in p.metrics if n.startswith(PART) and n.removeprefix(PART) not in domains})
    for name in names if len(names) > 1 else ():
        part = _Series(points, name, rules.window)
        if part.enough and part.fell(rules.opposed_drop):
            what = (
                f"suspected: the reward rose to {reward.last:.3f}, while its part {name.removeprefix(PART)!r} fell "
                f"from {max(part.means):.3f} to {part.last:.3f}; look at trajectories (`rollmill samples`)"
            )
            return Alert(Kind.REWARD_HACKING, points[-1].version, what)
    return None


def _mismatch(points: Sequence[Point], rules: Rules) -> Alert | None:
    kl = _Series(points, "mismatch_kl", rules.window)
    if not kl.enough or kl.last <= rules.mismatch_kl or kl.last < 2 * kl.first:
        return None
    what = (
        f"the KL between the engine's and the trainer's log-probs is {kl.last:.3g} nats per token and was "
        f"{kl.first:.3g}; numerics (model.dtype, engine), or too large an alpha or learning rate"
    )
    return Alert(Kind.LOGPROB_MISMATCH, points[-1].version, what)
