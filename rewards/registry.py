"""Finds a reward function by name or by `module:attribute`, and scores with it.

A name is one of `BUILT_IN` or an entry point of the group `rollmill.rewards` of any installed package.

Invariants: `score` returns at least one part and only finite numbers, or raises RewardFailure; a reward that
fails is never 0. What is wrong with the section itself is a ConfigError.
"""

from __future__ import annotations

import math

from rewards.protocol import Reward, TrajectoryView
from rl.config.work import DomainSection
from rl.errors import ConfigError, RewardFailure
from rl.plugins import check_options, find

GROUP = "rollmill.rewards"
BUILT_IN = {"outcome": "rewards.outcome:outcome"}


def reward_function(spec: str, field: str = "reward") -> Reward:
    """The reward of that name or at that `module:attribute`. Raises ConfigError, which names `field`."""
    found = find(spec, GROUP, BUILT_IN, field)
    if not callable(found):
        raise ConfigError(f"{field}: {spec!r} is not callable")
    return found


def check_reward(domain: DomainSection) -> Reward:
    """The domain's reward, once its options are known to fit. Raises ConfigError."""
    at = f"domains.{domain.name}"
    function = reward_function(domain.reward, f"{at}.reward")
    check_options(function, domain.reward_options, f"{at}.reward_options", given=1)
    return function


def score(domain: DomainSection, view: TrajectoryView) -> dict[str, float]:
    """The named parts of one trajectory's reward. Raises RewardFailure."""
    function = check_reward(domain)
    who = f"reward {domain.reward!r} of domain {domain.name!r}"
    try:
        parts = function(view, **domain.reward_options)
    except Exception as error:
        raise RewardFailure(f"{who} raised {type(error).__name__}: {error}") from error
    if not isinstance(parts, dict) or not parts:
        raise RewardFailure(f"{who} gave {parts!r}, not a dict of named parts")
    for name, value in parts.items():
        if not (isinstance(name, str) and isinstance(value, int | float) and math.isfinite(value)):
            raise RewardFailure(f"{who}: part {name!r} is {value!r}, not a finite number")
    return {name: float(value) for name, value in parts.items()}
