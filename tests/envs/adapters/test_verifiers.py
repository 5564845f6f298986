"""An environment of the library verifiers, played by the library in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from envs.adapters.child import ChildFailed
from envs.adapters.verifiers import Verifiers
from envs.agents import ClientInfo, Outcome
from infra.proxy.session_wire import Opened, SessionRecord
from rl.errors import ConfigError
from rl.sessions import Said, chosen
from rl.trajectory import Problem
from tests.envs.adapters.libraries import python_of
from tests.proxy.agents.qwen import Lesson, save_qwen
from tests.proxy.agents.serving import AgentProxy, serving

pytestmark = pytest.mark.slow  # the library takes seconds to import

OPENING = [Said("system", "Say a number."), Said("user", "Guess my number, 1 to 9.")]
LESSON = Lesson([OPENING, [Said("user", "higher")]], ["5", "7"])


@pytest.fixture(autouse=True)
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the library finds `number_tasks`, as if it were installed."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("tasksets")))


def made(player: dict[str, Any] | None = None, **task: bool) -> Verifiers:
    env = {"taskset": {"id": "number_tasks", "task": task}, "player": player or {}}
    return Verifiers(env, python_of("verifiers"))


def problem(seed: int, split: str = "train") -> Problem:
    return Problem(seed, "numbers", seed, seed, split)


async def play(run: AgentProxy, environment: Verifiers, name: str, **limits: Any) -> tuple[Outcome, SessionRecord]:
    opened: Opened = await run.open(name, **limits)
    await environment.reset(problem(len(name)))
    client = ClientInfo(opened.base_url, opened.token, opened.model)
    outcome = await environment.run(problem(len(name)), client)
    await environment.close()
    return outcome, await run.close(opened)


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[AgentProxy]:
    async with serving(save_qwen(tmp_path / "model", [LESSON]), tmp_path / "cache") as running:
        yield running


async def test_episodes_are_recorded_and_scored_side_by_side_until_turns_are_used_up(run: AgentProxy) -> None:
    guess = made()
    both = await asyncio.gather(play(run, guess, "a"), play(run, guess, "bb"), play(run, guess, "ccc", max_turns=1))
    for outcome, record in both[:2]:
        assert outcome.reward == 1.5 and outcome.info["rewards"] == {"brief": 0.5, "won": 1.0}
        assert outcome.info["task"].startswith("number ") and not outcome.info["truncated"]
        assert record.drift == {} and record.ended is None and record.limit is None
        branch = chosen(record.turns)
        assert [turn.parent for turn in record.turns] == [None, 0] and len(branch) == 2
        assert all(len(turn.logprobs) == len(turn.token_ids) > 0 for turn in branch)
    outcome, record = both[2]
    assert outcome.reward == 0.5 and len(record.turns) == 1 and record.limit == "max_turns"


@pytest.fixture
async def reader() -> AsyncIterator[str]:
    """A model that calls the first tool that it is shown, if any, and says what that answered."""

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        message: dict[str, Any] = {"role": "assistant", "content": body["messages"][-1]["content"]}
        if body["messages"][-1]["role"] == "user" and body.get("tools"):
            function = {"name": body["tools"][0]["function"]["name"], "arguments": '{"digits": 3}'}
            message = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
        choice = {"index": 0, "finish_reason": "tool_calls" if "tool_calls" in message else "stop", "message": message}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
        return web.json_response(answer)

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", complete)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


async def test_tools_of_the_library_are_called_and_its_failures_are_failures(reader: str) -> None:
    client = ClientInfo(reader, "secret", "reader")
    outcome = await made(tool=True).run(problem(0), client)
    assert outcome.reward == 1.5, "the tool gives the number, and finds no key in its environment"
    with pytest.raises(ChildFailed, match=r"VerifiersFailed: .*the rules are lost"):
        await made({"max_turns": 1}, broken=True).run(problem(0), client)


def test_what_is_wrong_with_it_is_said_before_the_first_episode() -> None:
    wrong = {"env": {"taskset": {"id": "no_such_tasks"}}, "python": python_of("verifiers")}
    with pytest.raises(ConfigError, match=r"the library can not make it: .*'no_such_tasks' not found"):
        Verifiers.prepare(wrong)
    with pytest.raises(ValueError, match="env must name a taskset"):
        Verifiers({}, python_of("verifiers"))
    with pytest.raises(ValueError, match=r"tasks \(0\) must be at least 1"):
        Verifiers(wrong["env"], python_of("verifiers"), tasks=0)
