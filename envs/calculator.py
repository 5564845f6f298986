"""A stateful calculator: the policy chains tool calls on an accumulator, then reads its display.

    user       start 5 add 7 times 3
    assistant  <tool>+7</tool>
    tool       1 2
    assistant  <tool>*3</tool>
    tool       3 6
    assistant  <answer>6</answer>

The reward is 1 exactly if the accumulator holds the right value when the answer is given, and the answer is the
last digit on the display; else 0. So the calculator's answers are needed: a policy that can not multiply has to
read them. A turn that is neither a call nor an answer, or a value beyond `LIMIT`, ends the episode with 0. The
number of turns is bounded by the domain's `max_turns`; the expert needs one more than there are operations.

Invariant: a problem is its opening text, and the split is decided by that text.
"""

from __future__ import annotations

import random
import re
from typing import ClassVar

from envs.protocol import Environment, Hints, Mistake, Step, in_split
from rl.trajectory import Message, Problem

LIMIT = 10**12
WORDS = {"+": "add", "-": "take", "*": "times"}
INSTRUCTIONS = (
    "You hold a calculator whose display already shows the start value. Apply the operations of the task in "
    "order, one per message: <tool>+7</tool> adds 7, <tool>-7</tool> takes 7 away, <tool>*7</tool> "
    "multiplies by 7. The calculator answers with its new display, digit by digit. After the last operation "
    "write the last digit of the display, as in <answer>7</answer>, and nothing else."
)
_CALL = re.compile(r"<tool>([+*-])([0-9]{1,6})</tool>")
_ANSWER = re.compile(r"<answer>([0-9])</answer>")


class Calculator(Environment):
    """Between `operations_min` and `operations_max` operations on numbers from 2 to `largest`.

    More operations are harder, for every one must be made, in order and only once. `instructions` opens
    with a system message that explains the task, for models that were not warm-started on it.
    """

    hints: ClassVar[Hints] = Hints(expected_turns=4, prompt_tokens=16, response_tokens=6)

    def __init__(self, operations_min: int = 2, operations_max: int = 4, largest: int = 16, instructions: bool = False):
        if not 1 <= operations_min <= operations_max:
            raise ValueError(f"operations_min ({operations_min}) must be from 1 to operations_max ({operations_max})")
        if not 2 <= largest < 10**6:
            raise ValueError(f"largest ({largest}) must be from 2 to 999999")
        self._lengths = range(operations_min, operations_max + 1)
        self._largest = largest
        self._instructions = instructions
        self._todo: list[tuple[str, int]] = []
        self._accumulator = 0
        self._target = 0
        self._calls = 0

    async def reset(self, problem: Problem) -> list[Message]:
        rng = random.Random(problem.seed)
        while not in_split(text := self._draw(rng), problem.split):
            pass
        opening = [Message("user", text)]
        return [Message("system", INSTRUCTIONS), *opening] if self._instructions else opening

    def _draw(self, rng: random.Random) -> str:
        count = rng.choice(self._lengths)
        self._accumulator = rng.randint(2, self._largest)
        self._todo = [(rng.choice("+-*"), rng.randint(2, self._largest)) for _ in range(count)]
        self._calls = 0
        self._target = self._accumulator
        self.difficulty = count
        for operator, number in self._todo:
            self._target = _apply(self._target, operator, number)
        return f"start {self._accumulator}" + "".join(f" {WORDS[o]} {n}" for o, n in self._todo)

    async def step(self, action: str) -> Step:
        answer = _ANSWER.fullmatch(action)
        if answer is not None:
            right = self._accumulator == self._target and answer[1] == _display(self._accumulator)[-1]
            return _end("right" if right else "wrong", float(right))
        call = _CALL.fullmatch(action)
        if call is None:
            return _end("invalid", 0.0, Mistake.INVALID)
        self._calls += 1
        self._accumulator = _apply(self._accumulator, call[1], int(call[2]))
        if abs(self._accumulator) > LIMIT:
            return _end("overflow", 0.0)
        return Step(Message("tool", _display(self._accumulator)))

    def expert_action(self) -> str:
        if self._calls < len(self._todo):
            operator, number = self._todo[self._calls]
            return f"<tool>{operator}{number}</tool>"
        return f"<answer>{_display(self._accumulator)[-1]}</answer>"

    def random_action(self, rng: random.Random) -> str:
        if rng.random() < 0.5:
            return f"<answer>{rng.randrange(10)}</answer>"
        return f"<tool>{rng.choice('+-*')}{rng.randint(2, self._largest)}</tool>"


def _display(value: int) -> str:
    """One digit per cell."""
    return " ".join(str(value))


def _apply(value: int, operator: str, number: int) -> int:
    return {"+": value + number, "-": value - number, "*": value * number}[operator]


def _end(how: str, reward: float, error: str | None = None) -> Step:
    return Step(Message("tool", how), reward, terminated=True, info={"end": how}, error=error)
