"""Environments in a process of their own: the same episodes as in this one, and no way to stay behind."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from envs.adapters.child import ROOT, Child, ChildFailed
from envs.calculator import Calculator
from envs.check import Subject, examine
from envs.episodes import play
from envs.protocol import Environment, Mistake
from rl.errors import ConfigError
from rl.trajectory import Message
from tests.envs.quiz import Quiz

PROBLEM = Subject.problem(1)
WICKED = """
import os, subprocess, sys, time
from envs.protocol import Environment, Step
from rl.trajectory import Message

class Wicked(Environment):
    async def reset(self, problem):
        print("not an answer")
        return [Message("user", "go")]

    async def step(self, action):
        if action == "hang":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            time.sleep(600)
        if action == "exit":
            print("I leave", file=sys.stderr, flush=True)
            os._exit(3)
        if action == "raise":
            raise ZeroDivisionError("a bug")
        return Step(Message("user", "fine"), float("nan") if action == "nan" else 0.5, info={"pid": os.getpid()})
"""


@pytest.fixture
def wicked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Child]:
    """Makes children that misbehave on demand, and whose code is not of this package."""
    (tmp_path / "wicked_package.py").write_text(WICKED)
    python = tmp_path / "python"  # an interpreter of the test's own, so that no idle child without that path is used
    python.symlink_to(sys.executable)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    return lambda: Child("wicked_package:Wicked", python=str(python))


async def gone(pids: list[int]) -> bool:
    """Whether these processes end within ten seconds."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return True
        await asyncio.sleep(0.02)
    return False


@pytest.mark.parametrize("kind", [Calculator, Quiz])
@pytest.mark.parametrize("skilled", [True, False])
async def test_an_episode_in_a_child_is_the_same(kind: type[Environment], skilled: bool) -> None:
    def says(environment: Environment, messages: list[Message]) -> str:
        return environment.expert_action() if skilled else f"<answer>{len(messages)}</answer>"

    there, here = Child(f"{kind.__module__}:{kind.__name__}"), kind()
    assert await play(there, PROBLEM, says, 10) == await play(here, PROBLEM, says, 10)
    assert (list(there.tools), there.fingerprint()) == (list(here.tools), here.fingerprint())
    assert len({there.random_action(random.Random(seed)) for seed in (1, 1)}) == 1
    await there.close()


async def test_it_keeps_the_promises_of_an_environment() -> None:
    findings = await examine(Subject(lambda: Child("envs.calculator:Calculator", {"largest": 9}), problems=5))
    assert [f for f in findings if not f.ok] == []


async def test_a_child_that_closed_well_serves_the_next_episode(wicked: Callable[[], Child]) -> None:
    pids = []
    for _ in range(2):
        environment = wicked()
        await environment.reset(PROBLEM)
        pids.append((await environment.step("go")).info["pid"])
        await environment.close()
    assert pids[0] == pids[1]


@pytest.mark.parametrize(
    ("action", "why"),
    [
        ("raise", "ZeroDivisionError: a bug"),
        ("nan", "not JSON compliant"),
        ("exit", "it ended; it last wrote: not an answer\nI leave"),
    ],
)
async def test_what_goes_wrong_in_a_child_is_named(wicked: Callable[[], Child], action: str, why: str) -> None:
    environment = wicked()
    await environment.reset(PROBLEM)
    try:
        with pytest.raises(ChildFailed, match=why):
            await environment.step(action)
    finally:
        await environment.close()


async def test_a_hung_child_is_killed_with_all_that_it_started(wicked: Callable[[], Child]) -> None:
    environment = wicked()
    await environment.reset(PROBLEM)
    pid = (await environment.step("go")).info["pid"]
    step = asyncio.create_task(environment.step("hang"))
    while not (children := psutil.Process(pid).children()):
        await asyncio.sleep(0.02)
    step.cancel()
    await environment.close()
    assert await gone([pid, *(child.pid for child in children)])


async def test_a_child_ends_with_the_process_that_made_it() -> None:
    program = (
        "import asyncio, os, sys\n"
        "from envs.adapters.child import Child\n"
        "from rl.trajectory import Problem\n"
        "async def main():\n"
        "    environment = Child('envs.calculator:Calculator')\n"
        "    await environment.reset(Problem(0, 'd', 0, 1))\n"
        "    print(environment._process._popen.pid, flush=True)\n"
        "    sys.stdin.read()\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout and parent.stdin
    pid = int(await asyncio.to_thread(parent.stdout.readline))
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    assert await gone([pid])
    parent.stdin.close()
    parent.stdout.close()


async def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"environment \('gem'\) must be of the form module:Class"):
        Child("gem")
    with pytest.raises(ValueError, match=r"python \('/nowhere/python'\) is no interpreter"):
        Child("a:B", python="/nowhere/python")
    with pytest.raises(ConfigError, match=r"can not be made: ValueError: largest \(1\) must be"):
        Child.prepare({"environment": "envs.calculator:Calculator", "options": {"largest": 1}})
    with pytest.raises(ChildFailed, match="reset comes first"):
        await Child("envs.calculator:Calculator").step("1")


async def test_a_mistake_of_the_policy_passes_through() -> None:
    environment = Child("envs.calculator:Calculator")
    await environment.reset(PROBLEM)
    step = await environment.step("hello")
    assert (step.error, step.reward, step.terminated) == (Mistake.INVALID, 0.0, True)
    assert isinstance(environment.random_action(random.Random(0)), str)
    await environment.close()
