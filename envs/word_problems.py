"""Word problems with a calculator: the templates of GSM-Symbolic, in many numbers, from the library reasoning-gym.

    user       A loaf of bread at the cafe costs $6. bagels cost $1 each. How much more do 9 loaves of bread cost ...
    assistant  <tool_call>{"name": "calculate", "arguments": {"expression": "9 * 6"}}</tool_call>
    tool       54
    assistant  <tool_call>{"name": "calculate", "arguments": {"expression": "54 - 10"}}</tool_call>
    tool       44
    assistant  44
    user       right

The last number of the final answer counts: the reward is 1 if it is exactly the right one, else 0. The number of
turns is bounded by the domain's `max_turns`; the expert makes a call for every line of the worked solution that it can.

Invariants
- A problem is its text, and the split is decided by it.
- The calculator executes nothing and is exact (`envs.arithmetic`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Any, ClassVar

from pydantic import Field

from envs.arithmetic import ArithmeticMistake, evaluate, shown
from envs.protocol import Hints, Mistake, Step, in_split
from envs.reasoning import require_library
from envs.tools import ToolEnvironment, ToolError, tool, write_call
from rl.stream import derive_seed
from rl.trajectory import Message, Problem

MOST_STEPS = 14
"""More lines than any worked solution has."""
_NUMBER = re.compile(r"(?<![0-9.])-?[0-9][0-9,]{0,30}(?:\.[0-9]{1,30})?")
_RESULT = re.compile(r"[^0-9-]*(-?[0-9]+(?:\.[0-9]+)?)")
_TERM = re.compile(r"[-0-9.+*/()][-0-9.+*/() ]*$")


class WordProblems(ToolEnvironment):
    """Problems whose worked solution has from `steps_min` to `steps_max` lines; more are harder."""

    hints: ClassVar[Hints] = Hints(expected_turns=4, prompt_tokens=250, response_tokens=60)

    def __init__(self, steps_min: int = 1, steps_max: int = MOST_STEPS):
        if not 1 <= steps_min <= 5:
            raise ValueError(f"steps_min ({steps_min}) must be from 1 to 5: beyond, there are hardly any problems")
        if not max(2, steps_min) <= steps_max <= MOST_STEPS:
            raise ValueError(f"steps_max ({steps_max}) must be from {max(2, steps_min)} to {MOST_STEPS}")
        require_library("word_problems")
        self._steps = range(steps_min, steps_max + 1)
        self._plan: list[str] = []

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> None:
        """Import the library, which takes seconds."""
        cls(**options)
        _example(0)

    async def reset(self, problem: Problem) -> list[Message]:
        example = await self.in_thread(lambda: self._draw(problem))
        self._question, self._answer = example["question"], Fraction(example["answer"])
        self.difficulty = len(_worked(example))
        self._plan = [write_call("calculate", expression=text) for text in calculations(_worked(example))]
        return [Message("user", self._question)]

    def _draw(self, problem: Problem) -> dict[str, Any]:
        attempt = 0
        while True:
            example = _example(derive_seed(problem.seed, attempt))
            if len(_worked(example)) in self._steps and in_split(example["question"], problem.split):
                return example
            attempt += 1

    @tool
    def calculate(self, expression: Annotated[str, Field(description="Such as (3 + 4.5) * 2 / 5.")]) -> str:
        """Calculate with + - * / and parentheses; the result is rounded to four decimals."""
        self._plan = self._plan[1:]
        try:
            return shown(evaluate(expression))
        except ArithmeticMistake as mistake:
            raise ToolError(str(mistake)) from mistake

    def answer(self, text: str) -> Step:
        numbers = _NUMBER.findall(text)
        if not numbers:
            return _end("invalid", 0.0, Mistake.INVALID)
        right = Fraction(numbers[-1].replace(",", "")) == self._answer
        return _end("right" if right else "wrong", float(right))

    def fingerprint(self) -> object:
        return self._question

    def expert_action(self) -> str:
        return self._plan[0] if self._plan else shown(self._answer)


def calculations(worked: list[str]) -> list[str]:
    """The expressions in a worked solution that can be calculated and give what it says that they give."""
    found = []
    for line in worked:
        text = re.sub(r"(?<=[0-9 ])[x×](?=[ $€£0-9])", "*", line.replace(",", ""))
        text = re.sub(r"([0-9])%", r"\1/100", re.sub(r"/[A-Za-z]+", "", text))
        sides = text.split("=")
        for left, right in pairwise(sides):
            result = _RESULT.match(right)
            if result and (expression := _expression(left, Fraction(result[1]))):
                found.append(expression)
    return found


def _expression(text: str, value: Fraction) -> str | None:
    """The longest end of a text, its words left out, that calculates to the value."""
    term = _TERM.search(re.sub(r"[^-0-9.+*/() ]", "", text).strip())
    words = term[0].split() if term else []
    for start in range(len(words)):
        expression = " ".join(words[start:])
        try:
            if evaluate(expression) == value and re.search(r"[0-9)] ?[-+*/]", expression):
                return expression
        except ArithmeticMistake:
            continue
    return None


def _worked(example: dict[str, Any]) -> list[str]:
    """The lines of the worked solution."""
    return [line for line in example["metadata"]["answer_cot"].splitlines() if line and not line.startswith("####")]


def _example(seed: int) -> dict[str, Any]:
    from reasoning_gym.factory import create_dataset

    found: dict[str, Any] = create_dataset("gsm_symbolic", seed=seed, size=1)[0]
    return found


def _end(how: str, reward: float, error: str | None = None) -> Step:
    return Step(Message("user", how), reward, terminated=True, info={"end": how}, error=error)
