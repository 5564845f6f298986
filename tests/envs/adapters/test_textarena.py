"""A game of textarena as it is, in a process of its own."""

from __future__ import annotations

import sys

import pytest

from envs.adapters.child import Child
from envs.check import Subject
from envs.episodes import play
from envs.protocol import Mistake

pytestmark = pytest.mark.slow  # textarena takes seconds to import

SOLUTION = ("[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]")


def made(id: str = "TowerOfHanoi-v0") -> Child:
    return Child("envs.adapters.textarena:TextArena", {"id": id}, sys.executable)


async def test_a_tower_is_moved_and_a_wrong_move_is_told() -> None:
    environment = made()
    says = iter(("[A C]", "[A C]", *SOLUTION[1:]))
    episode = await play(environment, Subject.problem(0), lambda *_: next(says), 10)
    await environment.close()
    assert episode.messages[0].content.startswith("You are playing Tower of Hanoi with 3 disks.")
    assert [step.error for step in episode.steps] == [None, Mistake.INVALID, *[None] * 6]
    told = [step.observation.content for step in episode.steps]
    assert "A: [3, 2]" in told[0] and "You are playing" not in told[0], "nothing is told twice"
    assert episode.steps[-1].terminated and episode.reward == 1.0


async def test_equal_seeds_are_equal_games_and_others_are_not() -> None:
    openings = []
    for seed in (0, 0, 1, 2):
        environment = made("Sokoban-v0")
        openings.append((await environment.reset(Subject.problem(seed)))[0].content)
        await environment.close()
    assert openings[0] == openings[1] and len(set(openings)) > 1
