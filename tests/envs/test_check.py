"""Each promise that an environment may break is found by the check that is there for it, and by nothing less."""

from __future__ import annotations

import asyncio
import inspect
import random
import subprocess
import sys
import time
from functools import partial
from typing import Any, ClassVar

import pytest

from envs import check
from envs.calculator import Calculator
from envs.check import Subject, examine
from envs.frozen_lake import FrozenLake
from envs.protocol import Environment, Needs, Step
from rl.trajectory import Message, Problem
from tests.envs import quiz
from tests.envs.quiz import Quiz


class WrongOpening(Quiz):
    async def reset(self, problem: Problem) -> list[Message]:
        return (await super().reset(problem))[0]  # type: ignore[return-value]


class WrongStep(Quiz):
    def answer(self, text: str) -> Step:
        return Step(Message("user", "?"), reward="1.0", terminated=True)  # type: ignore[arg-type]


class NeverEnds(Quiz):
    def answer(self, text: str) -> Step:
        return Step(Message("user", "again"))


class ClosesOnce(Quiz):
    closed = False

    async def close(self) -> None:
        assert not self.closed
        self.closed = True


class FailsOnNonsense(Quiz):
    def answer(self, text: str) -> Step:
        int(text)
        return super().answer(text)


class PaysForNonsense(Quiz):
    def answer(self, text: str) -> Step:
        return Step(Message("user", "nice"), reward=1.0, terminated=True)


class GlobalRandom(Quiz):
    def add(self, a: int, b: int) -> str:
        return super().add(a, b)

    async def step(self, action: str) -> Step:
        step = await super().step(action)
        return Step(Message("tool", f"{step.observation.content} {random.random()}"), step.reward, step.terminated)


class SharedState(Quiz):
    shared: ClassVar[dict[str, Any]] = {}

    async def reset(self, problem: Problem) -> list[Message]:
        opening = await super().reset(problem)
        self.shared["numbers"] = self.numbers
        return opening

    def answer(self, text: str) -> Step:
        self.numbers = self.shared["numbers"]
        return super().answer(text)


class OneProblem(Quiz):
    async def reset(self, problem: Problem) -> list[Message]:
        return await super().reset(Problem(0, "", 0, 1))


class SplitBySeed(Quiz):
    async def reset(self, problem: Problem) -> list[Message]:
        rng = random.Random(problem.seed)
        self.numbers = rng.randint(1, 3), rng.randint(1, 3)
        return [Message("user", str(self.numbers))]


class Easy(Quiz):
    def random_action(self, rng: random.Random) -> str:
        return self.expert_action()


class Blocks(Quiz):
    async def step(self, action: str) -> Step:
        time.sleep(0.3)
        return await super().step(action)


class Hangs(Quiz):
    async def step(self, action: str) -> Step:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class TwoOfAName(Quiz):
    async def reset(self, problem: Problem) -> list[Message]:
        self.toolbox = {"one": self.toolbox["add"], "two": self.toolbox["add"]}
        return await super().reset(problem)


class Leaves(Quiz):
    started: ClassVar[list[subprocess.Popen]] = []

    async def reset(self, problem: Problem) -> list[Message]:
        if not self.started:  # one is enough to be found
            self.started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return await super().reset(problem)


async def failing(kind: type[Environment], **options: Any) -> dict[str, str]:
    found = await examine(Subject(partial(kind, **options), problems=20))
    assert len(found) == len(check.CHECKS) and all(finding.mend for finding in found)
    return {finding.name: finding.found for finding in found if not finding.ok}


@pytest.mark.parametrize("kind", [Quiz, Calculator, FrozenLake])
async def test_a_good_environment_passes(kind: type[Environment]) -> None:
    assert await failing(kind) == {}


def test_an_environment_is_a_file_of_less_than_60_lines() -> None:
    assert len(inspect.getsource(quiz).splitlines()) < 60


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (WrongOpening, "episodes", "no list of Messages"),
        (WrongStep, "episodes", "reward '1.0'"),
        (NeverEnds, "episodes", "does not end"),
        (ClosesOnce, "closing", "AssertionError"),
        (FailsOnNonsense, "nonsense", "ValueError"),
        (PaysForNonsense, "nonsense", "earned 1.0"),
        (PaysForNonsense, "scores", "at random"),
        (GlobalRandom, "determinism", "differs when repeated"),
        (SharedState, "independence", "side by side"),
        (OneProblem, "splits", "one and the same"),
        (SplitBySeed, "splits", "occur in both"),
        (Easy, "scores", "at random 1.00, expert 1.00"),
        (TwoOfAName, "tools", "one name"),
    ],
)
async def test_a_broken_promise_is_found(kind: type[Environment], name: str, words: str) -> None:
    assert words in (await failing(kind))[name]


def only(monkeypatch: pytest.MonkeyPatch, chosen: object) -> None:
    monkeypatch.setattr(check, "CHECKS", [entry for entry in check.CHECKS if entry[0] is chosen])


async def test_a_call_that_blocks_the_event_loop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, check.patience)
    assert "kept the event loop" in (await failing(Blocks))["patience"]


async def test_a_child_process_left_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, check.leftovers)
    try:
        assert "1 child processes, but needs.processes is 0" in (await failing(Leaves))["leftovers"]
        monkeypatch.setattr(Leaves, "needs", Needs(processes=1))
        monkeypatch.setattr(check, "GONE_S", 0.1)
        first = Leaves.started.pop()
        first.kill()
        first.wait(10)
        assert "1 child processes are alive after close" in (await failing(Leaves))["leftovers"]
    finally:
        for process in Leaves.started:
            process.kill()
            process.wait(10)


async def test_an_environment_that_hangs_ends_every_check_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "DEADLINE_S", 0.2)
    assert "did not end within 0.2 s" in (await failing(Hangs))["episodes"]
