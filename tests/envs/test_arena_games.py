"""textarena's games: transcripts, mistakes, bounds, splits, skill, and that no global generator is touched."""

from __future__ import annotations

import random
from functools import partial
from itertools import product
from typing import Any

import pytest

from envs import arena_games
from envs.arena_games import ArenaGame, GuessTheNumber, Mastermind, UnexpectedEnd, pegs
from envs.check import Subject, examine
from envs.episodes import at_random, expert, play
from envs.protocol import Mistake
from rl.errors import ConfigError
from rl.stream import derive_seed
from rl.trajectory import Problem

BOTH = pytest.mark.parametrize("kind", [Mastermind, GuessTheNumber])


def problem(seed: int, split: str = "train") -> Problem:
    return Problem(0, "games", 0, derive_seed("test", seed), split)


async def transcript(environment: ArenaGame) -> list[str]:
    episode = await play(environment, problem(1), expert, 20)
    await environment.close()
    return [f"{m.role}: {m.content}" for m in episode.messages[1:]]


def wrong(environment: ArenaGame) -> str:
    """A guess that is proper, new and not what is hidden."""
    rng = random.Random(0)
    taken = [*environment._tried, environment.hidden()]
    while (action := environment.random_action(rng)) in [f"[{' '.join(map(str, guess))}]" for guess in taken]:
        pass
    return action


async def test_mastermind_transcript() -> None:
    assert await transcript(Mastermind()) == [
        "assistant: [1 2 3]",
        "user: Submitted [1 2 3]. Feedback: 0 black peg(s), 1 white peg(s).",
        "assistant: [2 4 5]",
        "user: Submitted [2 4 5]. Feedback: 0 black peg(s), 2 white peg(s).",
        "assistant: [3 5 4]",
        "user: Submitted [3 5 4]. Feedback: 1 black peg(s), 1 white peg(s).",
        "assistant: [4 5 1]",
        "user: found",
    ]


async def test_guess_the_number_transcript() -> None:
    assert await transcript(GuessTheNumber()) == [
        "assistant: [50]",
        "user: The target number is higher.",
        "assistant: [75]",
        "user: The target number is higher.",
        "assistant: [88]",
        "user: The target number is lower.",
        "assistant: [81]",
        "user: The target number is higher.",
        "assistant: [84]",
        "user: found",
    ]


@BOTH
async def test_the_opening_is_the_librarys_and_names_the_bounds(kind: Any) -> None:
    (message,) = await kind(guesses=9).reset(problem(1))
    assert "9 turns" in message.content and str(kind()._largest) in message.content


@pytest.mark.parametrize(
    "make",
    [
        Mastermind,
        partial(Mastermind, digits=4, largest=6, guesses=10),
        partial(Mastermind, repeats=True, guesses=10),
        GuessTheNumber,
        partial(GuessTheNumber, largest=1000, guesses=10),
    ],
)
async def test_the_expert_always_finds_it_and_chance_hardly_ever(make: Any) -> None:
    episodes = [await play(make(), problem(seed), expert, 10) for seed in range(50)]
    assert all(episode.reward == 1.0 for episode in episodes)
    blind = [await play(make(), problem(seed), at_random(seed), 10) for seed in range(50)]
    assert sum(episode.reward for episode in blind) < 12


@BOTH
async def test_it_keeps_the_promises_of_an_environment(kind: Any) -> None:
    findings = await examine(Subject(kind, problems=20))
    assert [f for f in findings if not f.ok] == []


@BOTH
async def test_pythons_generator_is_neither_used_nor_seeded(kind: Any) -> None:
    await play(kind(), problem(0), expert, 10)  # importing the library may do as it likes
    random.seed(5)
    before = random.getstate()
    await play(kind(), problem(1), expert, 10)
    assert random.getstate() == before


@BOTH
async def test_one_mistake_is_answered_and_two_in_a_row_end_the_game(kind: Any) -> None:
    environment = kind()
    await environment.reset(problem(1))
    first = await environment.step("I guess five")
    assert first.error == Mistake.INVALID and not first.terminated and "invalid move" in first.observation.content
    assert (await environment.step(wrong(environment))).error is None
    assert not (await environment.step("[99999999999999999999999999999]")).terminated
    last = await environment.step("[" + "9" * 10_000 + "]")
    assert (last.reward, last.terminated, last.error, last.info) == (0.0, True, Mistake.INVALID, {"end": "invalid"})


@BOTH
async def test_guesses_are_bounded_and_mistakes_do_not_count_as_such(kind: Any) -> None:
    environment = kind(largest=9, guesses=3) if kind is Mastermind else kind(guesses=7)
    await environment.reset(problem(1))
    made = 0
    while True:
        action = wrong(environment)
        if made == 1:
            assert not (await environment.step("?")).terminated
        step = await environment.step(action)
        made += step.error is None
        if step.terminated:
            break
    assert made == environment._guesses and step.info == {"end": "out of guesses"} and step.reward == 0.0


async def test_the_last_guess_of_a_turn_counts_and_thinking_does_not() -> None:
    environment = GuessTheNumber()
    await environment.reset(problem(1))
    (number,) = environment.hidden()
    other = 1 + number % 100
    step = await environment.step(f"<think>[{other}]</think> Not [{other}] but [{number}].")
    assert (step.reward, step.info) == (1.0, {"end": "found"})


async def test_a_game_that_the_library_ends_by_itself_is_a_failure() -> None:
    environment = GuessTheNumber()
    await environment.reset(problem(1))
    environment._play.state.max_turns = 0
    (number,) = environment.hidden()
    with pytest.raises(UnexpectedEnd, match="after 1 guesses"):
        await environment.step(f"[{1 + number % 100}]")


async def test_pegs_are_counted_as_the_library_counts_them() -> None:
    environment = Mastermind(repeats=True)
    await environment.reset(problem(1))
    for guess in product(range(1, 6), repeat=3):
        assert pegs(guess, environment.hidden()) == environment._play._evaluate_guess(list(guess))


def test_without_the_library_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_games, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'rollmill\[textarena\]'"):
        Mastermind()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Mastermind, {"digits": 6}, r"digits \(6\) must be from 2 to 5"),
        (Mastermind, {"largest": 3}, r"largest \(3\) must be from 4 to 9"),
        (Mastermind, {"guesses": 0}, r"guesses \(0\)"),
        (GuessTheNumber, {"largest": 5}, r"largest \(5\) must be from 10"),
        (GuessTheNumber, {"guesses": 6}, r"guesses \(6\) must be from 7, what it takes, to 49"),
    ],
)
def test_mistakes_in_options_are_named(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)
