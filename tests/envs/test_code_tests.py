"""HumanEval in the sandbox: transcript, feedback, what stays hidden, splits, grading here or in the reward."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from envs.code_tests import LIMITS, CodeTests, tasks
from envs.protocol import Mistake, Step, in_split
from infra.sandbox.errors import SandboxFailure
from infra.sandbox.grading import Exam, agrade
from infra.sandbox.sandbox import Sandbox
from rewards.code import code_tests
from rewards.protocol import TrajectoryView
from rewards.registry import score
from rl.config.work import DomainSection
from rl.errors import RewardFailure
from rl.stream import derive_seed
from rl.trajectory import Message, Problem, Status


def problem(seed: int, split: str = "train") -> Problem:
    return Problem(0, "code", 0, derive_seed("test", seed), split)


def block(code: str) -> str:
    return f"Like this:\n```python\n{code}\n```\n"


async def submit(environment: CodeTests, *answers: str, seed: int = 3) -> list[Step]:
    await environment.reset(problem(seed))
    return [await environment.step(answer) for answer in answers]


def view(info: dict[str, Any], status: Status = Status.TERMINATED) -> TrajectoryView:
    return TrajectoryView(problem(3), (), status, 1, 50, 0.0, info)


OPENING = """Write the Python function `triangle_area`. Answer with the whole function and its imports in one block, \
from ```python to ```.

```python
def triangle_area(a, h):
    \"""Given length of a side and high return area for a triangle.
    >>> triangle_area(5, 3)
    7.5
    \"""
```

It has to pass:
assert triangle_area(5, 3) == 7.5
assert triangle_area(2, 2) == 2.0"""


async def test_transcript() -> None:
    environment = CodeTests(longest=2)
    assert await environment.reset(problem(2)) == [Message("user", OPENING)]
    assert await environment.step(block("def triangle_area(a, h): return a")) == Step(
        Message("user", "1 of 2 examples pass. The first that does not:\nassert triangle_area(5, 3) == 7.5\ngot 5")
    )
    info = {"task": "HumanEval/45", "examples_passed": 2, "examples": 2, "isolation": "full"}
    assert await environment.step(block("def triangle_area(a, h): return a * h / 2")) == Step(
        Message("user", "hidden tests: 1 of 1"), 1.0, terminated=True, info=info | {"hidden_passed": 1, "hidden": 1}
    )


async def test_the_expert_solves_its_task_in_one_turn() -> None:
    solved = set()
    for seed in range(24):
        environment = CodeTests(longest=1)
        await environment.reset(problem(seed, "heldout" if seed % 3 == 0 else "train"))
        step = await environment.step(environment.expert_action())
        assert (step.reward, step.terminated) == (1.0, True), environment.fingerprint()
        solved.add(environment.fingerprint())
    assert len(solved) > 10


@pytest.mark.slow
async def test_the_tests_of_every_task_accept_its_solution_and_nothing_that_does_nothing() -> None:
    sandbox = Sandbox(LIMITS)
    exams = [Exam(task.entry_point, task.tests, task.prompt) for task in tasks()]
    right = await asyncio.gather(
        *(agrade(sandbox, t.prompt + t.solution, exam) for t, exam in zip(tasks(), exams, strict=True))
    )
    assert [verdict.failures for verdict in right] == [(None,) * len(exam.tests) for exam in exams]
    idle = [agrade(sandbox, f"def {exam.entry_point}(*_): pass", exam) for exam in exams]
    assert not any(verdict.passed == len(verdict.failures) for verdict in await asyncio.gather(*idle))


async def test_a_random_agent_scores_badly() -> None:
    rng, total = random.Random(0), 0.0
    for seed in range(20):
        environment = CodeTests(submissions=1)
        await environment.reset(problem(seed))
        total += (await environment.step(environment.random_action(rng))).reward or 0.0
    assert total / 20 < 0.1


async def test_equal_problems_are_equal_and_splits_share_no_task() -> None:
    environment = CodeTests()
    names: dict[str, set[object]] = {"train": set(), "heldout": set()}
    for split, seen in names.items():
        for seed in range(300):
            opening = await environment.reset(problem(seed, split))
            seen.add(environment.fingerprint())
            if seed < 5:
                assert await CodeTests().reset(problem(seed, split)) == opening
    assert len(names["train"]) > 90 and len(names["heldout"]) > 15
    assert not names["train"] & names["heldout"]
    assert names["heldout"] <= {task.name for task in tasks() if in_split(task.name, "heldout")}


async def test_the_knobs_take_shorter_tasks_and_show_more_of_the_tests() -> None:
    lines = {task.name: len(task.solution.strip().splitlines()) for task in tasks()}
    drawn: dict[int, set[str]] = {}
    for longest in (2, 6, 40):
        environment = CodeTests(longest=longest)
        drawn[longest] = set()
        for seed in range(300):
            await environment.reset(problem(seed))
            drawn[longest].add(str(environment.fingerprint()))
        assert max(lines[name] for name in drawn[longest]) <= longest
    hardest = [max(lines[name] for name in found) for found in drawn.values()]
    assert hardest == sorted(set(hardest)), "each step up brings longer tasks"
    for examples in (0, 1, 3):
        (opening,) = await CodeTests(examples=examples).reset(problem(1))
        assert opening.content.count("\nassert ") == examples


async def test_hidden_tests_stay_hidden_until_the_end_and_after_it() -> None:
    """Neither the messages nor what ends up in the trajectory's info has any of them, unless the reward needs them."""
    environment = CodeTests()
    opening = await environment.reset(problem(3))
    steps = [await environment.step(block("def car_race_collision(n): return 4")) for _ in range(3)]
    (task,) = (task for task in tasks() if task.name == environment.fingerprint())
    said = " ".join([opening[0].content, *(step.observation.content + str(step.info) for step in steps)])
    for test in task.tests[2:]:
        assert test.replace("candidate", task.entry_point) not in said and test not in said
    assert [step.terminated for step in steps] == [False, False, True]
    assert (steps[-1].reward, steps[-1].info["hidden_passed"]) == (0.0, 0)


async def test_a_share_of_the_hidden_tests_can_be_rewarded() -> None:
    code = block("def triangle_area(a, h): return 4.0 if a == 8 else 7.5 if a == 5 else 40.0")
    rewards = {}
    for credit in ("all", "share"):
        environment = CodeTests(longest=2, examples=0, submissions=1, credit=credit)
        (step,) = await submit(environment, code, seed=2)
        rewards[credit] = step.reward
    assert rewards["all"] == 0.0
    assert rewards["share"] == pytest.approx(2 / 3)


async def test_what_is_wrong_with_an_answer_is_said() -> None:
    name = "car_race_collision"
    environment = CodeTests(longest=2, submissions=6)
    steps = await submit(
        environment,
        "I do not know.",
        block(f"def {name}(n) return n"),
        block("def another(n): return n"),
        block(f"def {name}(n):\n    import os; os._exit(0)"),
        block(f"def {name}(n): raise KeyError(n)"),
        f"def {name}(n):\n    return n * n\n",
    )
    said = [step.observation.content.splitlines()[-1] for step in steps]
    assert said == [
        "There is no code: put it into one block, from ```python to ```.",
        "The code can not be used: SyntaxError: expected ':' (solution, line 1)",
        "The code can not be used: NameError: the code does not define car_race_collision",
        "the program ended: it exited, or used more memory or processor time than it may",
        "KeyError: 2",
        "hidden tests: 3 of 3",
    ]
    assert [step.error for step in steps] == [Mistake.INVALID, *[None] * 5]
    assert (steps[-1].reward, steps[-1].terminated) == (1.0, True)


async def test_the_last_answer_without_code_ends_with_nothing() -> None:
    (step,) = await submit(CodeTests(submissions=1), "no idea")
    assert (step.reward, step.terminated, step.error) == (0.0, True, Mistake.INVALID)


@pytest.mark.parametrize(("body", "parts"), [("n * n", {"all": 1.0, "share": 1.0}), ("4", {"all": 0.0, "share": 0.0})])
async def test_grading_can_be_left_to_the_reward(body: str, parts: dict[str, float]) -> None:
    environment = CodeTests(longest=2, submissions=1, graded_by_reward=True)
    (step,) = await submit(environment, block(f"def car_race_collision(n): return {body}"))
    assert step.terminated and step.reward is None and "hidden_passed" not in step.info
    for credit, part in parts.items():
        section = DomainSection(
            name="d", environment="code_tests", reward="code_tests", reward_options={"credit": credit}
        )
        assert score(section, view(step.info)) == {"tests": part}


def test_the_reward_tells_an_unfinished_episode_from_a_wrong_environment() -> None:
    assert code_tests(view({}, Status.TRUNCATED)) == {"tests": 0.0}
    with pytest.raises(ValueError, match="info has no 'exam'; set the environment's option graded_by_reward"):
        code_tests(view({}))


async def test_a_failing_sandbox_is_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = CodeTests(longest=2, graded_by_reward=True, submissions=1)
    (step,) = await submit(environment, block("def car_race_collision(n): return n"))

    def broken(*_: object) -> None:
        raise SandboxFailure("no more processes")

    starter = type(environment._sandbox._starter)
    monkeypatch.setattr(starter, "start", broken)
    section = DomainSection(name="d", environment="code_tests", reward="code_tests")
    with pytest.raises(RewardFailure, match="SandboxFailure: no more processes"):
        score(section, view(step.info))
    with pytest.raises(SandboxFailure):
        await submit(CodeTests(), block("def f(): pass"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"examples": -1}, r"examples \(-1\) must not be negative"),
        ({"submissions": 0}, r"submissions \(0\) must be at least 1"),
        ({"longest": 0}, r"longest \(0\) leaves no task"),
        ({"credit": "half"}, r"credit \('half'\) must be"),
        ({"isolation": "none"}, r"isolation \('none'\) must be"),
    ],
)
def test_mistakes_in_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CodeTests(**options)
