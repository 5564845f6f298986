"""Gymnasium's own environments, in text."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from envs.adapters.gymnasium import Gymnasium
from envs.check import Subject, examine
from envs.episodes import at_random, play
from envs.protocol import Mistake
from rl.trajectory import Message

MOVES = ("left", "down", "right", "up")
LAKE: dict[str, Any] = {
    "id": "FrozenLake-v1",
    "options": {"render_mode": "ansi", "is_slippery": False},
    "actions": MOVES,
    "prompt": "Walk from S to G.",
}


async def test_transcript() -> None:
    environment = Gymnasium(**LAKE)
    says = iter(["down", "dance", "down", "right", "right", "down", "right"])
    episode = await play(environment, Subject.problem(0), lambda *_: next(says), 10)
    assert episode.messages[0] == Message(
        "user", "Walk from S to G. Answer with one of left, down, right, up.\n\x1b[41mS\x1b[0mFFF\nFHFH\nFFFH\nHFFG"
    )
    assert episode.steps[0].observation == Message("user", "(Down)\nSFFF\n\x1b[41mF\x1b[0mHFH\nFFFH\nHFFG")
    assert [step.error for step in episode.steps] == [None, Mistake.INVALID, *[None] * 5]
    assert (episode.reward, episode.steps[-1].terminated) == (1.0, True)


@pytest.mark.parametrize(
    "options", [LAKE, {"id": "Blackjack-v1"}, {"id": "CartPole-v1"}, {"id": "Pendulum-v1"}, {"id": "Taxi-v4"}]
)
async def test_episodes_are_decided_by_the_problem(options: dict[str, Any]) -> None:
    """Also while another episode is played beside it."""
    played = []
    for _ in range(2):
        environment, other = Gymnasium(**options), Gymnasium(**options)
        await other.reset(Subject.problem(9))
        played.append(await play(environment, Subject.problem(1), at_random(1), 15))
        await other.step(other.random_action(random.Random(0)))
        await environment.close()
        await other.close()
    assert played[0] == played[1]
    assert not any(step.error for step in played[0].steps)


async def test_numbers_are_told_as_json() -> None:
    environment = Gymnasium("CartPole-v1")
    opening = (await environment.reset(Subject.problem(0)))[0].content
    assert opening.startswith("CartPole-v1. Answer with a member of Discrete(2), as JSON.\n[")
    step = await environment.step(" 1\n")
    assert len(json.loads(step.observation.content)) == 4 and step.reward == 1.0
    for text in ("2", "-1", "true", "1.5", "one", "[1]", "", "9" * 400, "NaN"):
        assert (await environment.step(text)).error == Mistake.INVALID, text


async def test_members_of_a_box_are_lists() -> None:
    environment = Gymnasium("Pendulum-v1")
    await environment.reset(Subject.problem(0))
    assert (await environment.step("[0.5]")).error is None
    for text in ("[9.0]", "0.5", "[0.5, 0.5]", "{}", "null", '["a"]', "[[0.5]]"):
        assert (await environment.step(text)).error == Mistake.INVALID, text


async def test_it_keeps_the_promises_of_an_environment() -> None:
    findings = await examine(Subject(lambda: Gymnasium(**LAKE), max_turns=30, problems=10))
    assert [f for f in findings if not f.ok] == []


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"actions \(left, right\) do not name all of Discrete\(4\)"):
        Gymnasium("FrozenLake-v1", actions=["left", "right"])
    with pytest.raises(ValueError, match=r"id \('Lake-v9'\) can not be made"):
        Gymnasium("Lake-v9")
