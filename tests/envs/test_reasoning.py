"""reasoning-gym's families: transcripts, levels, scoring of anything, splits, and that nothing global is touched."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import reasoning
from envs.check import Subject, examine
from envs.episodes import at_random, expert, play
from envs.protocol import Mistake
from envs.reasoning import FAMILIES, LEVELS, Reasoning
from rl.errors import ConfigError
from rl.stream import derive_seed
from rl.trajectory import Problem


def problem(seed: int, split: str = "train") -> Problem:
    return Problem(0, "puzzles", 0, derive_seed("test", seed), split)


async def test_transcript() -> None:
    environment = Reasoning("prime_factorization")
    episode = await play(environment, problem(1), expert, 1)
    assert [f"{m.role}: {m.content}" for m in episode.messages] == [
        "user: Find the prime factorization of 171. Write the factors separated by × (Example: for 12 the answer would "
        "be: 2 × 2 × 3)\n\nPut your answer between <answer> and </answer>.",
        "assistant: <answer>3 × 3 × 19</answer>",
        "user: right",
    ]
    assert episode.reward == 1.0 and episode.steps[-1].info == {"end": "right"}


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_family_keeps_the_promises_of_an_environment(family: str) -> None:
    findings = await examine(Subject(partial(Reasoning, family), problems=20))
    assert [f for f in findings if not f.ok] == []


@pytest.mark.parametrize("family", FAMILIES)
async def test_at_every_level_the_library_calls_its_own_answers_right_and_others_wrong(family: str) -> None:
    random.seed(1)
    before = random.getstate()
    for level in LEVELS:
        right = [await play(Reasoning(family, level), problem(seed), expert, 1) for seed in range(10)]
        assert [episode.reward for episode in right] == [1.0] * 10
        blind = [await play(Reasoning(family, level), problem(seed), at_random(seed), 1) for seed in range(30)]
        assert sum(episode.reward for episode in blind) < 5
    assert random.getstate() == before


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_harder_level_asks_for_more(family: str) -> None:
    lengths = []
    for level in LEVELS:
        environment, total = Reasoning(family, level), 0
        for seed in range(20):
            (message,) = await environment.reset(problem(seed))
            total += message.content.count("_") if family == "mini_sudoku" else len(message.content)
        lengths.append(total)
    assert lengths == sorted(lengths) and lengths[0] < lengths[2]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60)
@given(answer=st.text(max_size=40) | st.text("0123456789.,-×* \n_()XO'[]", max_size=40) | st.just("9" * 900))
def test_any_answer_is_scored(family: str, answer: str) -> None:
    async def score() -> None:
        environment = Reasoning(family, credit="share")
        await environment.reset(problem(2))
        step = await environment.step(f"<answer>{answer}</answer>")
        assert step.terminated and 0.0 <= (step.reward or 0.0) <= 1.0

    asyncio.run(score())


async def test_the_last_answer_counts_and_thinking_does_not() -> None:
    async def end(action: str) -> tuple[float | None, str | None]:
        environment = Reasoning()
        await environment.reset(problem(3))
        step = await environment.step(action.replace("RIGHT", str(environment._puzzle["answer"])))
        return step.reward, step.error

    assert await end("<answer>x</answer> no: <answer> RIGHT </answer>.") == (1.0, None)
    assert await end("<answer><answer>RIGHT</answer>") == (1.0, None)
    assert await end("<answer>RIGHT</answer> no: <answer>x</answer>") == (0.0, None)
    for unreadable in ("RIGHT", "<think><answer>RIGHT</answer></think>", f"<answer>{'1' * 1001}</answer>"):
        assert await end(unreadable) == (0.0, Mistake.INVALID)


async def test_a_share_is_given_for_an_answer_that_is_right_in_part() -> None:
    rewards = {}
    for credit in ("all", "share"):
        environment = Reasoning("word_sorting", credit=credit)
        await environment.reset(problem(1))
        words = environment._puzzle["answer"].split(", ")
        rewards[credit] = (await environment.step(f"<answer>{', '.join([words[0], *words[:0:-1]])}</answer>")).reward
    assert rewards["all"] == 0.0 and 0.2 <= rewards["share"] < 1.0


def test_without_the_library_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'rollmill\[reasoning-gym\]'"):
        Reasoning()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "countdown"}, r"family \('countdown'\) must be one of chain_sum"),
        ({"level": "brutal"}, r"level \('brutal'\) must be one of easy"),
        ({"credit": "half"}, r"credit \('half'\)"),
    ],
)
def test_mistakes_in_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reasoning(**options)
