"""An OpenEnv environment on OpenEnv's own server."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from envs.adapters.openenv import OpenEnv, OpenEnvFailed
from envs.check import Subject, examine
from envs.episodes import play
from envs.protocol import Environment, Mistake
from rl.trajectory import Message
from tests.envs.adapters.libraries import python_of

pytestmark = pytest.mark.slow  # the server takes seconds to import


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = subprocess.Popen(
        [python_of("openenv"), str(Path(__file__).with_name("guess_server.py"))], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout
    try:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def bisect(_: Environment, messages: list[Message]) -> str:
    low, high = 1, 100
    for said, told in zip(messages[1::2], messages[2::2], strict=True):
        number = json.loads(said.content)["number"]
        low, high = (number + 1, high) if told.content == "higher" else (low, number - 1)
    return json.dumps({"number": (low + high) // 2})


async def test_a_number_is_guessed(url: str) -> None:
    environment = OpenEnv(url, observation="hint", prompt="From 1 to 100.")
    episode = await play(environment, Subject.problem(0), bisect, 10)
    await environment.close()
    assert episode.messages[0] == Message("user", "From 1 to 100.\nguess")
    assert (episode.reward, episode.steps[-1].terminated, episode.messages[-1].content) == (1.0, True, "right")
    assert episode.steps[-1].info == {"steps": len(episode.steps)}


async def test_sessions_side_by_side_are_apart(url: str) -> None:
    def made() -> OpenEnv:
        return OpenEnv(url, observation="hint")

    async def played(seed: int) -> list[Message]:
        environment = made()
        episode = await play(environment, Subject.problem(seed), bisect, 10)
        await environment.close()
        return episode.messages

    alone = [await played(seed) for seed in range(4)]
    assert list(await asyncio.gather(*map(played, range(4)))) == alone
    assert len({str(messages) for messages in alone}) > 1


async def test_a_plain_text_becomes_a_field_and_all_is_told_as_json(url: str) -> None:
    environment = OpenEnv(url, action="number")
    opening = await environment.reset(Subject.problem(0))
    assert json.loads(opening[0].content)["hint"] == "guess"
    step = await environment.step("50")
    assert json.loads(step.observation.content)["hint"] in ("higher", "lower", "right")
    with pytest.raises(OpenEnvFailed, match=r"action \('number'\) does not fit: number: Input should be"):
        await environment.step("fifty")
    await environment.close()


async def test_mistakes_of_the_policy_are_told_from_failures_of_the_server(url: str) -> None:
    environment = OpenEnv(url, observation="hint")
    await environment.reset(Subject.problem(0))
    for text in ("fifty", "[50]", '{"guess": 50}', '{"number": "x"}'):
        step = await environment.step(text)
        assert step.error == Mistake.INVALID and not step.terminated
    assert (await environment.step('{"number": 0}')).observation.content == "higher"
    with pytest.raises(OpenEnvFailed, match="a bug"):
        await environment.step('{"number": -1}')
    await environment.close()
    with pytest.raises(OpenEnvFailed, match="reset comes first"):
        await environment.step('{"number": 1}')


async def test_it_keeps_the_promises_of_an_environment(url: str) -> None:
    findings = await examine(Subject(lambda: OpenEnv(url, observation="hint"), problems=5))
    assert [f for f in findings if not f.ok] == []


async def test_a_server_that_is_not_there_is_a_failure() -> None:
    environment = OpenEnv("http://127.0.0.1:1")
    with pytest.raises(aiohttp.ClientError):
        await environment.reset(Subject.problem(0))
    await environment.close()
    with pytest.raises(ValueError, match=r"url \('localhost:1'\) must begin with http"):
        OpenEnv("localhost:1")
