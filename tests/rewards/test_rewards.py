"""The outcome reward, and what `score` does with rewards that fail."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rewards.outcome import outcome
from rewards.protocol import TrajectoryView
from rewards.registry import check_reward, reward_function, score
from rl.config.work import DomainSection
from rl.errors import ConfigError, RewardFailure
from rl.trajectory import Problem, Status

VIEW = TrajectoryView(Problem(0, "d", 0, 1), (), Status.TERMINATED, 3, 12, 0.5, {"end": "goal"})


def domain(reward: str, **options: Any) -> DomainSection:
    return DomainSection(name="d", environment="calculator", reward=reward, reward_options=options)


def scaled(view: TrajectoryView, factor: float = 1.0) -> dict[str, float]:
    return {"scaled": view.environment_reward * factor, "turns": view.turns}


def broken(view: TrajectoryView, answer: Any = None) -> Any:
    if answer is None:
        raise ZeroDivisionError("no answer")
    return answer


def test_outcome_is_the_environments_verdict() -> None:
    assert reward_function("outcome") is outcome
    assert score(domain("outcome"), VIEW) == {"outcome": 0.5}


def test_options_reach_the_function_and_parts_are_floats() -> None:
    parts = score(domain(f"{__name__}:scaled", factor=4.0), VIEW)
    assert parts == {"scaled": 2.0, "turns": 3.0} and all(type(part) is float for part in parts.values())


@pytest.mark.parametrize("answer", [None, {}, 1.0, {"a": math.nan}, {"a": math.inf}, {"a": "1"}, {"a": None}])
def test_a_reward_that_can_not_be_computed_raises_and_is_never_zero(answer: Any) -> None:
    options = {} if answer is None else {"answer": answer}
    with pytest.raises(RewardFailure, match="of domain 'd'"):
        score(domain(f"{__name__}:broken", **options), VIEW)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (domain("outcme"), "domains.d.reward: nothing is named 'outcme'; did you mean 'outcome'?"),
        (domain("nowhere:thing"), "domains.d.reward: can not load"),
        (domain("rewards.registry:GROUP"), "is not callable"),
        (domain("outcome", scale=2), "domains.d.reward_options.scale: unknown option; known are none"),
        (domain(f"{__name__}:scaled", factr=2), "did you mean 'factor'?"),
    ],
)
def test_mistakes_are_named(section: DomainSection, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        check_reward(section)
