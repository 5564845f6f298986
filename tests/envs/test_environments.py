"""Calculator and frozen lake: transcripts, determinism, splits, and that they measure skill."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.calculator import Calculator
from envs.frozen_lake import MOVES, FrozenLake
from envs.protocol import Environment, in_split
from rl.stream import derive_seed
from rl.trajectory import Message, Problem

Policy = Callable[[Environment, list[Message]], str]
BOTH = pytest.mark.parametrize("kind", [Calculator, FrozenLake])


def problem(seed: int, split: str = "train") -> Problem:
    return Problem(0, "test", 0, derive_seed("test", seed), split)


async def play(
    environment: Environment, start: Problem, policy: Policy, max_turns: int = 10
) -> tuple[list[str], float]:
    """The transcript as `role: content` lines, and the sum of rewards."""
    messages, reward = await environment.reset(start), 0.0
    for _ in range(max_turns):
        action = policy(environment, messages)
        step = await environment.step(action)
        messages = [*messages, Message("assistant", action), step.observation]
        reward += step.reward or 0.0
        if step.terminated:
            break
    await environment.close()
    return [f"{m.role}: {m.content}" for m in messages], reward


async def mean_reward(kind: type[Environment], policy: Policy, episodes: int = 200) -> float:
    return sum([(await play(kind(), problem(seed), policy))[1] for seed in range(episodes)]) / episodes


def expert(environment: Environment, _: list[Message]) -> str:
    return environment.expert_action()


async def test_calculator_transcript() -> None:
    assert await play(Calculator(), problem(1), expert) == (
        [
            "user: start 14 take 12 add 14 times 5",
            "assistant: <tool>-12</tool>",
            "tool: 2",
            "assistant: <tool>+14</tool>",
            "tool: 1 6",
            "assistant: <tool>*5</tool>",
            "tool: 8 0",
            "assistant: <answer>0</answer>",
            "tool: right",
        ],
        1.0,
    )


async def test_frozen_lake_transcript() -> None:
    assert await play(FrozenLake(), problem(1), expert) == (
        [
            "user: up:far down:near left:far right:near",
            "assistant: [down]",
            "user: up:far down:hole left:far right:near",
            "assistant: [up]",
            "user: up:far down:near left:far right:near",
            "assistant: [down]",
            "user: up:far down:hole left:far right:near",
            "assistant: [right]",
            "user: goal",
        ],
        1.0,
    )


@BOTH
async def test_equal_problems_and_actions_give_equal_episodes(kind: type[Environment]) -> None:
    for seed in range(20):
        assert await play(kind(), problem(seed), expert) == await play(kind(), problem(seed), expert)


@BOTH
async def test_no_problem_of_one_split_occurs_in_the_other(kind: type[Environment]) -> None:
    """On a problem space small enough to be exhausted, so that a seed-only split would be caught."""
    options = {"operations_max": 2, "largest": 3} if kind is Calculator else {"size": 2, "hole_share": 0.25}
    seen: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for split, openings in seen.items():
        for seed in range(400):
            environment = kind(**options)
            text = (await environment.reset(problem(seed, split)))[-1].content
            if isinstance(environment, FrozenLake):
                text = str((sorted(environment._holes), environment._position, environment._goal))
            openings.add(text)
    assert len(seen["train"]) > 3 and seen["heldout"]
    assert not seen["train"] & seen["heldout"]


@given(st.text(max_size=20))
def test_splits_partition_every_problem_space(fingerprint: str) -> None:
    assert in_split(fingerprint, "train") != in_split(fingerprint, "heldout")


async def test_calculator_expert_is_always_right() -> None:
    assert await mean_reward(Calculator, expert) == 1.0


async def test_calculator_can_not_be_solved_without_reading_its_display() -> None:
    def blind(environment: Environment, _: list[Message]) -> str:
        action = environment.expert_action()
        return "<answer>4</answer>" if action.startswith("<answer>") else action

    assert await mean_reward(Calculator, blind) < 0.3


async def test_random_agents_score_badly() -> None:
    rng = random.Random(0)

    def calls(_: Environment, __: list[Message]) -> str:
        if rng.random() < 0.25:
            return f"<answer>{rng.randint(0, 9)}</answer>"
        return f"<tool>{rng.choice('+-*')}{rng.randint(2, 16)}</tool>"

    def moves(_: Environment, __: list[Message]) -> str:
        return f"[{rng.choice(list(MOVES))}]"

    assert await mean_reward(Calculator, calls) < 0.05
    assert await mean_reward(FrozenLake, moves) < 0.2


async def test_frozen_lake_leaves_room_above_its_demonstrator_and_words_are_enough() -> None:
    def greedy(_: Environment, messages: list[Message]) -> str:
        near = re.findall(r"(\w+):near", messages[-1].content)
        return f"[{near[0] if near else 'up'}]"

    demonstrated = await mean_reward(FrozenLake, expert)
    assert 0.4 < demonstrated < 0.7
    assert await mean_reward(FrozenLake, greedy) > demonstrated + 0.15


@BOTH
async def test_what_is_no_action_ends_the_episode_with_nothing(kind: type[Environment]) -> None:
    for text in (
        "",
        " ",
        "hello",
        "[UP]",
        "[up] ",
        "<tool>+7</tool",
        "<tool>/7</tool>",
        "<tool>+٣</tool>",
        "<tool>+1234567</tool>",
    ):
        environment = kind()
        await environment.reset(problem(0))
        step = await environment.step(text)
        assert (step.terminated, step.reward, step.info) == (True, 0.0, {"end": "invalid"})


async def test_calculator_wants_every_operation_exactly_once() -> None:
    for script, end in ((["<answer>1</answer>"], "wrong"), (["<tool>*999999</tool>"] * 10, "overflow")):
        environment = Calculator()
        await environment.reset(problem(3))
        for text in script:
            step = await environment.step(text)
            if step.terminated:
                break
        assert (step.reward, step.info["end"]) == (0.0, end)


async def test_frozen_lake_runs_out_of_moves() -> None:
    environment = FrozenLake(hole_share=0.0, max_steps=2)
    await environment.reset(problem(1))
    edge = "[up]" if environment._position[0] == 0 else "[down]"
    await environment.step(edge)
    step = await environment.step({"[up]": "[up]", "[down]": "[up]"}[edge])
    assert step.terminated and (step.info["end"] == "time" or step.reward == 1.0)


async def slides(slip: float, seed: int) -> list[tuple[int, int]]:
    """Where moves up from the middle of an empty lake lead."""
    environment, ways = FrozenLake(size=9, hole_share=0.0, max_steps=1000, slip=slip), []
    await environment.reset(problem(seed))
    for _ in range(200):
        environment._position, environment._goal = (4, 4), (0, 0)
        await environment.step("[up]")
        ways.append((environment._position[0] - 4, environment._position[1] - 4))
    return ways


async def test_slippery_ice_leads_to_the_sides_and_as_the_seed_says() -> None:
    assert set(await slides(0.0, 1)) == {(-1, 0)}
    ways = await slides(0.4, 1)
    assert set(ways) == {(-1, 0), (0, -1), (0, 1)} and 90 <= ways.count((-1, 0)) <= 150
    assert ways == await slides(0.4, 1) != await slides(0.4, 2)


async def test_slip_makes_a_lake_harder() -> None:
    def shortest(environment: Environment, _: list[Message]) -> str:
        assert isinstance(environment, FrozenLake)
        return f"[{environment._path()[0]}]"

    async def solved(slip: float) -> float:
        return sum([(await play(FrozenLake(slip=slip, max_steps=20), problem(s), shortest, 20))[1] for s in range(100)])

    assert await solved(0.0) == 100 and 20 < await solved(0.4) < 80


async def test_instructions_open_with_a_system_message() -> None:
    for environment in (Calculator(instructions=True), FrozenLake(instructions=True)):
        assert [m.role for m in await environment.reset(problem(0))] == ["system", "user"]
