"""BFCL: several requests, each to be done by calls of a simulated file system, car, bank or the like.

    user       Move log.txt into a new directory archive.
    assistant  <tool_call>{"name": "mkdir", "arguments": {"dir_name": "archive"}}</tool_call>
               <tool_call>{"name": "mv", "arguments": {"source": "log.txt", "destination": "archive"}}</tool_call>
    tool       mkdir: None ...
    assistant  done
    user       Look for the word Error in it.

A turn without a call ends a request. It was done if the simulators are in the state in which BFCL's own calls leave
them, and all that those calls answered was answered to the policy, too, in any order. The first request that was not
done ends the episode, as nothing can make up for it.

Invariants
- A task is a BFCL conversation, and the split is decided by its number: variants of one conversation stay together.
- What a simulator raises is the answer to the call, as in BFCL, and never a failure of the environment.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, ClassVar, Literal

from envs.data.bfcl import CATEGORIES, Simulation, Task, contains_all, functions, tasks
from envs.protocol import Hints, Needs, Step, in_split
from envs.tools import Call, Tool, ToolEnvironment, ToolError, write_call
from rl.trajectory import Message, Problem

ARRIVED = "These functions can be called from now on, too; try again:"
_TYPES: dict[str, Any] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
}  # fmt: skip


class FunctionCalling(ToolEnvironment):
    """Conversations of at most `requests` requests, of BFCL's category `base`, `miss_param` (a request lacks what a
    later one gives), `miss_func` (a function arrives late) or `long_context` (answers are long).

    The reward is 1 if every request was done, or with `credit: share` the share that was.
    """

    hints: ClassVar[Hints] = Hints(expected_turns=8, prompt_tokens=4000, response_tokens=60)
    needs: ClassVar[Needs] = Needs(memory_mb=4)

    def __init__(
        self,
        category: Literal["base", "miss_param", "miss_func", "long_context"] = "base",
        requests: int = 8,
        credit: Literal["all", "share"] = "all",
    ):
        if category not in CATEGORIES:
            raise ValueError(f"category ({category!r}) must be one of {', '.join(CATEGORIES)}")
        if credit not in ("all", "share"):
            raise ValueError(f"credit ({credit!r}) must be 'all' or 'share'")
        self._tasks = [task for task in _solvable(category) if len(task.requests) <= requests]
        if not {True, False} <= {in_split(task.number, "train") for task in self._tasks}:
            raise ValueError(f"requests ({requests}) leaves no task for training or none held out; 8 takes them all")
        self._credit = credit
        self._task = self._tasks[0]
        self._at = 0
        self._calls = 0
        """Calls since the request."""
        self._answers: list[str] = []

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> None:
        """Read the tasks and import the simulators."""
        cls(**options)

    async def reset(self, problem: Problem) -> list[Message]:
        mine = [task for task in self._tasks if in_split(task.number, problem.split)]
        self._task = task = random.Random(problem.seed).choice(mine)
        self._live, self._ideal = await self.in_thread(lambda: (Simulation(task), Simulation(task)))
        hidden = {*task.excluded, *(name for names in task.withheld.values() for name in names)}
        self.toolbox = {name: tool for name, tool in _toolbox(task).items() if name not in hidden}
        return [Message("user", task.requests[0])]

    def make(self, call: Call) -> str:
        """Call a simulator. Raises ToolError with what it raised."""
        text, answered = self._live.call(call)
        self._calls += 1
        self._answers.append(text)
        if not answered:
            raise ToolError(text)
        return text

    def answer(self, text: str) -> Step:
        """The end of a request: the next one, or the end of the episode."""
        solution = self._task.solutions[self._at]
        wanted = [self._ideal.call(call)[0] for call in solution]
        done = not solution or (
            self._calls > 0 and self._live.equals(self._ideal) and contains_all(self._answers, wanted)
        )
        self._at += done
        self._calls = 0
        of = len(self._task.requests)
        if done and self._at < of:
            return Step(Message("user", self._request()))
        reward = self._at / of if self._credit == "share" else float(done)
        info = {"task": f"{self._task.category}_{self._task.number}", "done": self._at, "requests": of}
        return Step(Message("user", f"done: {self._at} of {of}"), reward, terminated=True, info=info)

    def _request(self) -> str:
        arrived = {name: _toolbox(self._task)[name] for name in self._task.withheld.get(self._at, ())}
        self.toolbox = {**self.toolbox, **arrived}
        shown = [json.dumps(tool.schema, ensure_ascii=False) for tool in arrived.values()]
        return "\n".join([*([ARRIVED, *shown] if shown else []), self._task.requests[self._at]]).strip()

    def fingerprint(self) -> object:
        return self._task.number

    def expert_action(self) -> str:
        solution = self._task.solutions[self._at]
        if self._calls < len(solution):
            return "\n".join(write_call(call.name, **call.arguments) for call in solution)
        return "Done."


@cache
def _solvable(category: str) -> tuple[Task, ...]:
    """Without the one or two tasks whose own calls break the schemas, or come before their function arrives."""
    return tuple(task for task in tasks(category) if all(map(partial(_can_be_made, task), range(len(task.solutions)))))


def _can_be_made(task: Task, turn: int) -> bool:
    late = {name for at, names in task.withheld.items() if at > turn for name in names}
    known = {name: tool for name, tool in _toolbox(task).items() if name not in late and name not in task.excluded}
    try:
        return all(known[call.name].check(call.arguments) is not None for call in task.solutions[turn])
    except (KeyError, ValueError):
        return False


def _toolbox(task: Task) -> dict[str, Tool]:
    """All functions of a task's simulators."""
    schemas = {name: schema for simulator in task.simulators for name, schema in functions(simulator).items()}
    return {name: Tool(schema, partial(_make, name), partial(_check, schema)) for name, schema in schemas.items()}


def _make(name: str, environment: FunctionCalling, /, **arguments: Any) -> str:
    return environment.make(Call(name, arguments))


def _check(schema: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = schema["function"]["parameters"]
    properties = parameters["properties"]
    for name, value in arguments.items():
        if name not in properties:
            raise ValueError(f"{name} is none of {', '.join(properties) or 'the parameters, as there are none'}")
        kind = properties[name].get("type", "string")
        if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
            raise ValueError(f"{name} must be of type {kind}")
    if missing := [name for name in parameters.get("required", ()) if name not in arguments]:
        raise ValueError(f"{missing[0]} is missing")
    return arguments
