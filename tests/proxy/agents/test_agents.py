"""Episodes that an agent plays by itself, through the stage `interact`, against a real proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI

from envs.agents import ClientInfo, Outcome
from infra.proxy.client import TrajectoryCancelled
from rl.errors import (
    ConfigError,
    EnvironmentFailure,
    EnvironmentProtocolError,
    EnvironmentTimeout,
    GenerationFailure,
    InjectedFailure,
    StaleTrajectory,
)
from rl.trajectory import Problem, Status, Trajectory, Uid
from tasks import runtime
from tasks.interact import interact
from tasks.reset import Member
from tests.proxy.agents.serving import AgentProxy, serving
from tests.proxy.agents.words import ADD, ANSWER, CALL, QUESTION
from tests.proxy.conftest import make_config

RUNNING: list[AgentProxy] = []
"""The proxy of the test, for agents that do something to it."""


def _client(client: ClientInfo) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0)


async def adds(problem: Problem, client: ClientInfo, bonus: float = 0.0) -> Outcome:
    """Asks, calls the tool, and asks for the answer; before that it has a word aside."""
    agent, messages = _client(client), [{"role": "user", "content": QUESTION}]
    ask: dict[str, Any] = {"model": client.model, "tools": [ADD], "messages": messages}
    aside = {"messages": [{"role": "user", "content": "A title?"}], "max_tokens": 4}
    await agent.chat.completions.create(**ask | aside)
    said = (await agent.chat.completions.create(**ask)).choices[0].message
    call = said.tool_calls[0]
    messages += [said, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    said = (await agent.chat.completions.create(**ask)).choices[0].message
    return Outcome(float(said.content == ANSWER) + bonus, {"answer": said.content})


async def ask_for_ever(problem: Problem, client: ClientInfo, swallow: bool = False) -> float:
    agent, messages = _client(client), [{"role": "user", "content": QUESTION}]
    while True:
        try:
            said = await agent.chat.completions.create(model=client.model, messages=messages, max_tokens=3)
        except APIStatusError:
            if swallow:
                return 0.25
            raise
        messages += [said.choices[0].message, {"role": "user", "content": "And?"}]


async def misbehaves(problem: Problem, client: ClientInfo, how: str) -> Any:
    if how == "silent":
        return 1.0
    agent, (run,) = _client(client), RUNNING
    ask: dict[str, Any] = {"model": client.model, "messages": [{"role": "user", "content": "?"}], "max_tokens": 2}
    await agent.chat.completions.create(**ask)
    match how:
        case "raises":
            raise ZeroDivisionError("its own fault")
        case "hangs":
            await asyncio.sleep(600)
        case "wrong":
            return float("nan")
        case "stale":
            run.proxy.oldest_viable = 1
        case "cancelled":
            await run.rollout.abort("d-train-0.0-0-0")
        case "down":
            run.proxy.serving = None
    await agent.chat.completions.create(**ask)
    return 1.0


@pytest.fixture
async def play(taught: Path, tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Trajectory]]]:
    made: list[runtime.Runtime] = []
    async with serving(taught, tmp_path / "proxy") as run:
        RUNNING.append(run)

        async def one(function: str, options: dict[str, Any] | None = None, **changes: Any) -> Trajectory:
            given = {"function": f"tests.proxy.agents.test_agents:{function}", "options": options or {}}
            domain = {"name": "d", "environment": "agent", "environment_options": given} | changes.pop("domain", {})
            rollout = {"temperature": 0.1, "max_new_tokens": 64, "max_tokens": 400}
            config = make_config(domains=[domain], rollout=rollout, **changes)
            here = runtime._RUNTIMES["agents"] = runtime.Runtime(config, run.url, tmp_path, run.keys.rollout)
            made.append(here)
            return await interact("agents", Member(Uid(0, 0), 0, 0, Problem(0, "d", 0, 7), 0))

        yield one
        for here in made:
            assert here.environments.live == 0
            await here.environments.close()
            await here.proxy.close()
        assert run.proxy.metrics.sessions._value.get() == 0
        RUNNING.clear()
        del runtime._RUNTIMES["agents"]


async def test_an_agents_episode_is_a_trajectory_like_any_other(play):
    trajectory = await play("adds", {"bonus": 0.5})
    trajectory.check()
    assert (trajectory.environment_reward, trajectory.status, trajectory.turns) == (1.5, Status.TERMINATED, 2)
    assert [(m.role, m.content) for m in trajectory.messages] == [
        ("user", QUESTION), ("assistant", CALL), ("tool", "5"), ("assistant", ANSWER),
    ]  # fmt: skip
    assert trajectory.info == {
        "answer": ANSWER,
        "session": {"branches": 2, "untrained_tokens": 4, "drift": {"new_conversation": 1}},
    }
    stages = [span.stage for span in trajectory.spans]
    assert stages.count("generate") == 3 and all(span.end >= span.start for span in trajectory.spans)


async def test_a_policy_that_uses_up_its_turns_is_truncated_and_no_failure(play):
    trajectory = await play("ask_for_ever", domain={"max_turns": 3})
    assert (trajectory.status, trajectory.turns, trajectory.environment_reward) == (Status.TRUNCATED, 3, 0.0)
    assert trajectory.info == {"denied": "max_turns"}
    trajectory.check()
    trajectory = await play("ask_for_ever", {"swallow": True}, domain={"max_turns": 100})
    assert (trajectory.status, trajectory.environment_reward) == (Status.TRUNCATED, 0.25)
    assert 350 < len(trajectory.token_ids) <= 400


@pytest.mark.parametrize(
    ("how", "failure", "match"),
    [
        ("silent", EnvironmentFailure, "ended without a turn"),
        ("raises", EnvironmentFailure, "ZeroDivisionError.*its own fault"),
        ("wrong", EnvironmentProtocolError, "nan"),
        ("stale", StaleTrajectory, "grew too old"),
        ("cancelled", TrajectoryCancelled, "cancelled"),
        ("down", GenerationFailure, "no version is loaded"),
        ("hangs", EnvironmentTimeout, "longer than deadlines.trajectory"),
    ],
)
async def test_what_does_not_count_has_a_name(play, how, failure, match):
    deadlines = {"trajectory": 1.0} if how == "hangs" else {}
    with pytest.raises(failure, match=match):
        await play("misbehaves", {"how": how}, deadlines=deadlines)


async def test_an_agent_is_disturbed_on_purpose_like_any_environment(play):
    with pytest.raises(InjectedFailure):
        await play("adds", domain={"injection": {"step_failure": 1.0}})


async def test_what_is_no_agent_is_refused_before_anything_runs(play):
    for function, options, match in [
        ("QUESTION", {}, "no `async def`"),
        ("nobody", {}, "can not load"),
        ("adds", {"bonsu": 1}, "bonsu"),
    ]:
        with pytest.raises((ConfigError, EnvironmentFailure), match=match):
            await play(function, options)
