"""Finds reward functions by name or by `module:attribute`, scores with them, and adds them up.

A name is one of `BUILT_IN` or an entry point of the group `rollmill.rewards` of any installed package.

Invariants: parts are at least one and only finite numbers, else RewardFailure; a reward that fails is never 0.
What is wrong with the section itself is a ConfigError. The parts of a single reward keep their names; in a list
`part` of the reward `r` becomes `r.part` (or `r`, if that is what it is called), times the weight.
Runs in a function's bundle, too, and so imports nothing but the standard library, `rl` and `rewards`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rewards.protocol import Ask, Reward, TrajectoryView
from rl.errors import ConfigError, RewardFailure
from rl.plugins import check_options, find, known

if TYPE_CHECKING:
    from rl.config.rewards import RewardTerm
    from rl.config.run import RunConfig
    from rl.config.work import DomainSection

GROUP = "rollmill.rewards"
BUILT_IN = {
    "code_tests": "rewards.code:code_tests",
    "exact_match": "rewards.exact:exact_match",
    "format": "rewards.format:format",
    "judge": "rewards.judge:judge",
    "length": "rewards.length:length",
    "math": "rewards.mathematics:math",
    "outcome": "rewards.outcome:outcome",
}

Scorer = Callable[[str, TrajectoryView, Mapping[str, Any]], dict[str, float]]
"""`(name of the reward, view, options) -> parts`, here or elsewhere. Raises RewardFailure."""


def reward_function(spec: str, field: str = "reward") -> Reward:
    """The reward of that name or at that `module:attribute`. Raises ConfigError, which names `field`."""
    found = find(spec, GROUP, BUILT_IN, field)
    if not callable(found):
        raise ConfigError(f"{field}: {spec!r} is not callable")
    return found


def names() -> list[str]:
    """The rewards that are installed, by name."""
    return known(GROUP, BUILT_IN)


def wants_judge(function: Reward) -> bool:
    """Whether a reward asks a language model."""
    return "ask" in inspect.signature(function).parameters


def check_reward(domain: DomainSection) -> list[Reward]:
    """The domain's rewards, once their options are known to fit. Raises ConfigError."""
    return [_checked_term(term, *fields) for term, *fields in _terms(domain)]


def check_rewards(config: RunConfig) -> None:
    """The rewards of every domain, and that there is a judge if one is asked. Raises ConfigError."""
    for domain in config.domains:
        for term, function in zip(domain.terms, check_reward(domain), strict=True):
            if config.judge is None and wants_judge(function):
                raise ConfigError(f"judge: missing, but reward {term.name!r} of {domain.name!r} asks one; add it")


def _terms(domain: DomainSection) -> Iterable[tuple[RewardTerm, str, str]]:
    """Each term with the fields that name its function and its options."""
    at = f"domains.{domain.name}.reward"
    if isinstance(domain.reward, str):
        return [(domain.terms[0], at, f"{at}_options")]
    return [(term, f"{at}.{i}.name", f"{at}.{i}.options") for i, term in enumerate(domain.terms)]


def _checked_term(term: RewardTerm, name_field: str, options_field: str) -> Reward:
    function = reward_function(term.name, name_field)
    if "ask" in term.options:
        raise ConfigError(f"{options_field}.ask: is handed in, and no option; remove it")
    check_options(function, term.options, options_field, given=1)
    return function


def evaluate(
    function: Reward, view: TrajectoryView, options: Mapping[str, Any], ask: Ask | None = None
) -> dict[str, float]:
    """The parts that a reward function gives, here and now. Raises RewardFailure."""
    handed_in = {"ask": ask} if ask is not None and wants_judge(function) else {}
    try:
        parts = function(view, **options, **handed_in)
    except Exception as error:
        raise RewardFailure(f"it raised {type(error).__name__}: {error}") from error
    return checked(parts)


def checked(parts: Any) -> dict[str, float]:
    """Parts as floats. Raises RewardFailure unless they are named, finite numbers."""
    if not isinstance(parts, dict) or not parts:
        raise RewardFailure(f"it gave {parts!r:.200}, not a dict of named parts")
    for name, value in parts.items():
        if not (isinstance(name, str) and isinstance(value, int | float) and _finite(value)):
            raise RewardFailure(f"its part {name!r:.200} is {value!r:.200}, not a finite number")
    return {name: float(value) for name, value in parts.items()}


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def score(domain: DomainSection, view: TrajectoryView, by: Scorer | None = None) -> dict[str, float]:
    """The named parts of one trajectory's reward, each term scored by `by` (by default here). Raises RewardFailure."""
    total: dict[str, float] = {}
    for term in domain.terms:
        try:
            parts = (by or score_here)(term.name, view, term.options)
        except RewardFailure as error:
            raise RewardFailure(f"reward {term.name!r} of domain {domain.name!r}: {error}") from error
        if isinstance(domain.reward, str):
            return parts
        for part, value in parts.items():
            name = term.label if part == term.label else f"{term.label}.{part}"
            total[name] = total.get(name, 0.0) + term.weight * value  # dots in names may make two of them one
    return checked(total)


def score_here(name: str, view: TrajectoryView, options: Mapping[str, Any], ask: Ask | None = None) -> dict[str, float]:
    """One reward in this process. Raises RewardFailure."""
    return evaluate(reward_function(name), view, options, ask)


def score_batch(
    function: Reward, views: Sequence[TrajectoryView], options: Mapping[str, Any], ask: Ask | None = None
) -> list[dict[str, float] | RewardFailure]:
    """The parts for each view, or by what it failed: one failure costs itself only."""
    return [_outcome(function, view, options, ask) for view in views]


def _outcome(
    function: Reward, view: TrajectoryView, options: Mapping[str, Any], ask: Ask | None
) -> dict[str, float] | RewardFailure:
    try:
        return evaluate(function, view, options, ask)
    except RewardFailure as error:
        return error
