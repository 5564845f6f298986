"""A sum to be found with an adding tool: a whole environment, as a user would write it in a package of their own."""

import random

from envs.protocol import Hints, Step, in_split
from envs.tools import ToolEnvironment, ToolError, tool, write_call
from rl.trajectory import Message, Problem


class Quiz(ToolEnvironment):
    """Numbers up to `largest`."""

    hints = Hints(expected_turns=2, prompt_tokens=40, response_tokens=20)

    def __init__(self, largest: int = 999):
        self.largest, self.numbers, self.seen = largest, (0, 0), False

    async def reset(self, problem: Problem) -> list[Message]:
        rng = random.Random(problem.seed)
        while True:
            self.numbers = rng.randint(1, self.largest), rng.randint(1, self.largest)
            if in_split(self.numbers, problem.split):
                return [Message("user", f"What is {self.numbers[0]} plus {self.numbers[1]}?")]

    @tool
    def add(self, a: int, b: int) -> str:
        """The sum of two numbers."""
        if max(a, b) > self.largest:
            raise ToolError(f"numbers up to {self.largest} only")
        self.seen = True
        return str(a + b)

    def answer(self, text: str) -> Step:
        right = text == str(sum(self.numbers))
        return Step(Message("user", "right" if right else "wrong"), reward=float(right), terminated=True)

    def expert_action(self) -> str:
        if self.seen:
            return str(sum(self.numbers))
        return write_call("add", a=self.numbers[0], b=self.numbers[1])
