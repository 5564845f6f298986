"""Word problems: transcript, what counts as the answer, the calculator, difficulty, splits, and skill."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from envs.check import Subject, examine
from envs.episodes import expert, play
from envs.protocol import Mistake
from envs.tools import write_call
from envs.word_problems import WordProblems, calculations
from rl.stream import derive_seed
from rl.trajectory import Message, Problem


def problem(seed: int, split: str = "train") -> Problem:
    return Problem(0, "words", 0, derive_seed("test", seed), split)


def calculate(expression: str) -> str:
    return write_call("calculate", expression=expression)


async def test_transcript() -> None:
    episode = await play(WordProblems(), problem(1), expert, 10)
    assert [f"{m.role}: {m.content}" for m in episode.messages] == [
        "user: A bottle of tea is 13 mLs of tea. William drinks 3 bottles of tea. If tea has 5 calories per mL how "
        "many calories did he consume? Give the result as your final answer. Do not include units.",
        'assistant: <tool_call>\n{"name": "calculate", "arguments": {"expression": "13*3"}}\n</tool_call>',
        "tool: 39",
        'assistant: <tool_call>\n{"name": "calculate", "arguments": {"expression": "39*5"}}\n</tool_call>',
        "tool: 195",
        "assistant: 195",
        "user: right",
    ]
    assert episode.reward == 1.0


async def test_the_expert_is_right_and_mostly_calculates_its_way_to_the_answer() -> None:
    shown = 0
    for seed in range(100):
        episode = await play(WordProblems(), problem(seed, "heldout" if seed % 4 == 0 else "train"), expert, 10)
        assert episode.reward == 1.0 and not any(step.error for step in episode.steps)
        last_result, answer, _ = episode.messages[-3:]
        shown += last_result.content == answer.content
    assert shown > 85


@pytest.mark.parametrize(
    ("template", "right"),
    [
        ("{}", True),
        ("<think>7 or 8?</think> It is {}.", True),
        ("First 3, then 4, so the answer is ${}.00!", True),
        ("{} is not 3", False),
        ("3", False),
        ("-{}", False),
        ("{}.5", False),
        ("{}" + "0" * 5000, False),
    ],
)
async def test_the_last_number_of_the_answer_counts(template: str, right: bool) -> None:
    environment = WordProblems()
    await environment.reset(problem(1))
    step = await environment.step(template.format(environment._answer))
    assert (step.reward, step.terminated, step.error) == (float(right), True, None)


async def test_thousands_may_be_written_with_commas_and_no_number_is_a_mistake() -> None:
    environment = WordProblems()
    seed = 0
    await environment.reset(problem(seed))
    while environment._answer < 1000:
        seed += 1
        await environment.reset(problem(seed))
    assert (await environment.step(f"{int(environment._answer):,}")).reward == 1.0
    step = await environment.step("many")
    assert (step.reward, step.terminated, step.error) == (0.0, True, Mistake.INVALID)


async def test_the_calculator_answers_or_refuses_and_the_episode_goes_on() -> None:
    environment = WordProblems()
    await environment.reset(problem(1))
    assert (await environment.step(calculate("(1 + 2) * 2.5"))).observation == Message("tool", "7.5")
    for expression in ("1 / 0", "2 ** 9", "x + 1"):
        step = await environment.step(calculate(expression))
        assert step.error == Mistake.TOOL_ERROR and not step.terminated


@pytest.mark.parametrize(
    ("line", "expressions"),
    [
        ("The brokerage fee is $410,000 x 7/100 = $28,700.", ["410000 * 7/100"]),
        ("so he earns $40/day * 35 days/month = $1400/month, and 2 more", ["40 * 35"]),
        ("Charles slew 0.75 as many as David, or 400*0.75=300 trolls.", ["400*0.75"]),
        ("she has 72 + 43 + T = 115 + T = 182 toys", []),
        ("because 774.9 / 1.35 = 573", []),
    ],
)
def test_calculations_are_read_from_a_worked_solution_and_checked(line: str, expressions: list[str]) -> None:
    assert calculations([line]) == expressions


async def test_more_steps_take_more_calculations() -> None:
    async def calls(**steps: int) -> float:
        played = [await play(WordProblems(**steps), problem(seed), expert, 20) for seed in range(20)]
        return sum(len(episode.steps) - 1 for episode in played) / 20

    assert await calls(steps_max=2) < await calls(steps_min=3, steps_max=4) < await calls(steps_min=5)


async def test_it_keeps_the_promises_of_an_environment() -> None:
    findings = await examine(Subject(partial(WordProblems, steps_max=4), problems=30))
    assert [f for f in findings if not f.ok] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps_min": 6}, r"steps_min \(6\) must be from 1 to 5"),
        ({"steps_min": 4, "steps_max": 3}, r"steps_max \(3\) must be from 4 to 14"),
    ],
)
def test_mistakes_in_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WordProblems(**options)
