"""Finding rewards, adding them up, and what `score` does with rewards that fail."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.outcome import outcome
from rewards.protocol import Ask, TrajectoryView
from rewards.registry import check_reward, check_rewards, names, reward_function, score, score_batch, score_here
from rl.config.load import validate
from rl.config.work import DomainSection
from rl.errors import ConfigError, RewardFailure
from rl.trajectory import Message, Problem, Status

VIEW = TrajectoryView(Problem(0, "d", 0, 1), (), Status.TERMINATED, 3, 12, 0.5, {"end": "goal"})


def domain(reward: str, **options: Any) -> DomainSection:
    return DomainSection(name="d", environment="calculator", reward=reward, reward_options=options)


def weighted(*terms: dict[str, Any]) -> DomainSection:
    return DomainSection.model_validate({"name": "d", "environment": "calculator", "reward": terms})


def scaled(view: TrajectoryView, factor: float = 1.0) -> dict[str, float]:
    return {"scaled": view.environment_reward * factor, "turns": view.turns}


def broken(view: TrajectoryView, answer: Any = None) -> Any:
    if answer is None:
        raise ZeroDivisionError("no answer")
    return answer


def asking(view: TrajectoryView, ask: Ask) -> dict[str, float]:
    return {"asked": float(ask(view.messages))}


SCALED = f"{__name__}:scaled"


def test_outcome_is_the_environments_verdict() -> None:
    assert reward_function("outcome") is outcome
    assert score(domain("outcome"), VIEW) == {"outcome": 0.5}


def test_options_reach_the_function_and_parts_are_floats() -> None:
    parts = score(domain(SCALED, factor=4.0), VIEW)
    assert parts == {"scaled": 2.0, "turns": 3.0} and all(type(part) is float for part in parts.values())


def test_a_list_is_a_weighted_sum_with_parts_by_name() -> None:
    section = weighted({"name": "outcome", "weight": 0.1}, {"name": SCALED, "weight": -2, "options": {"factor": 4.0}})
    assert score(section, VIEW) == {"outcome": 0.05, "scaled": -4.0, "scaled.turns": -6.0}


def test_parts_that_come_to_one_name_are_added_and_none_is_lost() -> None:
    answers = {"m:a": {"b.c": 1.0}, "m:a.b": {"c": 10.0}}
    section = weighted({"name": "m:a"}, {"name": "m:a.b", "weight": 2})
    assert score(section, VIEW, lambda name, view, options: answers[name]) == {"a.b.c": 21.0}


def test_one_failing_reward_fails_the_sum() -> None:
    section = weighted({"name": "outcome"}, {"name": f"{__name__}:broken", "weight": 0.0})
    with pytest.raises(RewardFailure, match=rf"reward '{__name__}:broken' of domain 'd': it raised ZeroDivisionError"):
        score(section, VIEW)


def test_a_sum_beyond_all_numbers_is_a_failure() -> None:
    with pytest.raises(RewardFailure, match="not a finite number"):
        score(weighted({"name": SCALED, "weight": 1e308, "options": {"factor": 1e10}}), VIEW)


HUGE = {"a": 10**400}
"""As an integer it is finite."""


@pytest.mark.parametrize("answer", [None, {}, 1.0, {"a": math.nan}, {"a": math.inf}, {"a": "1"}, {"a": None}, HUGE])
def test_a_reward_that_can_not_be_computed_raises_and_is_never_zero(answer: Any) -> None:
    options = {} if answer is None else {"answer": answer}
    with pytest.raises(RewardFailure, match="of domain 'd'"):
        score(domain(f"{__name__}:broken", **options), VIEW)


def test_a_batch_has_one_outcome_for_each_view() -> None:
    views = [VIEW, TrajectoryView(VIEW.problem, (), Status.TERMINATED, 1, 1, math.nan, {}), VIEW]
    first, second, third = score_batch(scaled, views, {"factor": 2.0})
    assert first == third == {"scaled": 1.0, "turns": 3.0} and isinstance(second, RewardFailure)


def test_a_reward_that_asks_gets_what_was_handed_in() -> None:
    def ask(messages: Sequence[Message]) -> str:
        return str(len(messages))

    assert score_here(f"{__name__}:asking", VIEW, {}, ask) == {"asked": 0.0}
    assert score_here("outcome", VIEW, {}, ask) == {"outcome": 0.5}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (domain("outcme"), "domains.d.reward: nothing is named 'outcme'; did you mean 'outcome'?"),
        (domain("nowhere:thing"), "domains.d.reward: can not load"),
        (domain("rewards.registry:GROUP"), "is not callable"),
        (domain("outcome", scale=2), "domains.d.reward_options.scale: unknown option; known are none"),
        (domain(SCALED, factr=2), "did you mean 'factor'?"),
        (weighted({"name": "outcome"}, {"name": "maths"}), "domains.d.reward.1.name: nothing is named 'maths'"),
        (weighted({"name": "length", "options": {"fre": 1}}), "domains.d.reward.0.options.fre: unknown option"),
        (domain("judge", ask="me"), "domains.d.reward_options.ask: is handed in, and no option"),
    ],
)
def test_mistakes_are_named(section: DomainSection, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        check_reward(section)


TREE: dict[str, Any] = {"name": "t", "model": {"source": {"type": "pretrained", "path": "unused"}}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": []}, "domains.0.reward: .*at least 1 item"),
        ({"reward": [{"name": "outcome", "wieght": 1}]}, "did you mean 'weight'"),
        ({"reward": [{"name": "outcome", "weight": "inf"}]}, "domains.0.reward.0.weight: .*finite"),
        (
            {"reward": [{"name": "a:f"}, {"name": "b:f"}]},
            r"two rewards of the list are called the same in \['f', 'f'\]",
        ),
        ({"reward": [{"name": "outcome"}], "reward_options": {"a": 1}}, "in a list each has its own `options`"),
    ],
)
def test_a_list_that_is_none_is_a_mistake_of_the_configuration(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(TREE | {"domains": [{"name": "d", "environment": "calculator", **fields}]}, "test")


def test_a_judge_must_be_configured() -> None:
    tree = TREE | {"domains": [{"name": "d", "environment": "calculator", "reward": "judge"}]}
    with pytest.raises(ConfigError, match="judge: missing, but reward 'judge' of 'd' asks one; add it"):
        check_rewards(validate(tree, "test"))
    check_rewards(validate(tree | {"judge": {"base_url": "http://127.0.0.1:1/v1", "model": "m"}}, "test"))


def test_all_shipped_rewards_can_be_found() -> None:
    assert {"exact_match", "format", "judge", "length", "math", "outcome"} <= set(names())
    assert all(callable(reward_function(name)) for name in names())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.lists(st.builds(Message, st.sampled_from(["user", "assistant", "tool"]), st.text()), max_size=4),
    st.sampled_from(Status),
    st.floats(allow_nan=False),
    st.dictionaries(st.text(), json_values, max_size=3),
)
def test_a_view_travels_as_json(messages: list[Message], status: Status, reward: float, info: dict[str, Any]) -> None:
    view = TrajectoryView(Problem(1, "d", 2, 3, "heldout"), messages, status, 4, 5, reward, info)
    assert TrajectoryView.from_json(json.loads(json.dumps(view.as_json()))) == view
