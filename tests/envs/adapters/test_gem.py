"""GEM's own environments, in a process of their own."""

from __future__ import annotations

import pytest

from envs import check
from envs.adapters.child import Child
from envs.check import Subject
from envs.episodes import play
from envs.protocol import Environment
from rl.trajectory import Message
from tests.envs.adapters.libraries import python_of

pytestmark = pytest.mark.slow  # GEM takes seconds to import


def made(id: str) -> Child:
    return Child("envs.adapters.gem:Gem", {"id": id}, python_of("gem"))


def bisect(_: Environment, messages: list[Message]) -> str:
    """Finds a number from 1 to 10 by what it was told about its guesses."""
    low, high = 1, 10
    for message in messages[1:]:
        words = message.content.partition("\n")[0].rstrip(".").split()
        if "higher" in words:
            low = max(low, int(words[-1]) + 1)
        if "lower" in words:
            high = min(high, int(words[-1]) - 1)
    return f"\\boxed{{{(low + high) // 2}}}"


async def test_a_number_is_guessed() -> None:
    for seed in range(3):
        environment = made("game:GuessTheNumber-v0-easy")
        episode = await play(environment, Subject.problem(seed), bisect, 10)
        assert episode.messages[0].content.startswith("You are playing Guess The Number.\n")
        assert episode.messages[0].content.endswith("Enter your next guess.")
        assert episode.ended and episode.reward == 1.0
        assert "You guessed the correct number" in episode.messages[-1].content
        await environment.close()


async def test_it_keeps_the_promises_of_an_environment() -> None:
    """Those that depend on GEM; `test_child` has the others."""
    subject = Subject(lambda: made("game:Mastermind-v0-easy"), max_turns=12, problems=5)
    for keeps in (check.episodes, check.nonsense, check.determinism, check.splits, check.scores):
        await keeps(subject)


async def test_a_family_of_reasoning_gym_is_played_through_it() -> None:
    environment = made("rg:letter_counting")
    episode = await play(environment, Subject.problem(0), counts, 2)
    await environment.close()
    assert episode.ended and episode.reward == 1.0


def counts(_: Environment, messages: list[Message]) -> str:
    """Counts a letter in a text."""
    _, letter, _, text, *_ = messages[0].content.split('"')
    return f"\\boxed{{{text.lower().count(letter)}}}"
