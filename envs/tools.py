"""Environments whose policy calls tools, in the form that Hermes and Qwen models are trained on.

    assistant  <tool_call>
               {"name": "search", "arguments": {"query": "Ulan Bator"}}
               </tool_call>
    tool       1. Mongolia ...
    assistant  Mongolia

A turn is some text followed by calls and nothing else, or it is the final answer. Thinking, up to `</think>`, counts
as neither.

Invariants
- A turn that can not be read as a whole does nothing: no call of it is made.
- The calls of a turn are made in order, each gets its answer, and none after the episode's end.
- Whatever the policy writes is answered by a Step; what a tool raises, except `ToolError`, is a failure of the
  environment and passes through.
"""

from __future__ import annotations

import inspect
import json
import random
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from envs.protocol import Environment, Mistake, Step
from rl.calls import Call as Call
from rl.calls import Unreadable as Unreadable
from rl.calls import read_calls as read_calls
from rl.calls import spoken as spoken
from rl.calls import write_call as write_call
from rl.trajectory import Message

_MARK = "__rollmill_tool__"
F = TypeVar("F", bound=Callable[..., Any])


class ToolError(Exception):
    """Raised by a tool to refuse a proper call; the policy reads the message."""


@dataclass(frozen=True)
class Tool:
    """A callable tool. `check` gives the keyword arguments for `function`, or raises ValueError with what is wrong."""

    schema: dict[str, Any]
    """`{"type": "function", "function": {"name", "description", "parameters"}}`."""
    function: Callable[..., Any]
    """Called with the environment and the keywords. Plain functions run in the environment's thread, coroutine
    functions on the event loop. It returns text, any JSON value, or a Step to give a reward or end the episode."""
    check: Callable[[dict[str, Any]], dict[str, Any]]

    @classmethod
    def of(cls, method: Callable[..., Any]) -> Tool:
        """The tool of a method: types and defaults are its signature's, the description is its docstring;
        `Annotated[str, Field(description=...)]` describes a parameter. Raises TypeError without either."""
        name, description = method.__name__, inspect.getdoc(method)
        if not description:
            raise TypeError(f"tool {name!r} has no docstring; the policy needs one to know what it does")
        hints = get_type_hints(method, include_extras=True)
        fields: dict[str, Any] = {}
        for parameter in list(inspect.signature(method).parameters.values())[1:]:
            if parameter.name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise TypeError(f"tool {name!r}: parameter {parameter.name!r} needs a name and a type of its own")
            required = parameter.default is inspect.Parameter.empty
            fields[parameter.name] = (hints[parameter.name], ... if required else parameter.default)
        model = create_model(name, __config__=ConfigDict(extra="forbid", strict=True), **fields)
        parameters = _untitled(model.model_json_schema())
        function = {"name": name, "description": description, "parameters": parameters}
        return cls({"type": "function", "function": function}, method, lambda found: _checked(model, found))


def _checked(model: type[BaseModel], arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        found = model.model_validate_json(json.dumps(arguments))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    return {name: getattr(found, name) for name in model.model_fields}


def _untitled(schema: Any) -> Any:
    """Without the titles that pydantic gives, which are tokens without information."""
    if isinstance(schema, list):
        return [_untitled(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {k: _untitled(v) for k, v in schema.items() if not (k == "title" and isinstance(v, str))}


def tool(method: F) -> F:
    """Declare a method of a ToolEnvironment as a tool; see `Tool.of`."""
    setattr(method, _MARK, Tool.of(method))
    return method


class ToolEnvironment(Environment):
    """Write `reset`, the tools and `answer`. Tools that depend on the problem are put into `toolbox` by `reset`."""

    toolbox: Mapping[str, Tool] = {}
    """The tools of this episode by name: those of the class and its bases, unless `reset` puts others here."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        names = dict.fromkeys(name for kind in reversed(cls.__mro__) for name in vars(kind))  # in order of writing
        found = {name: getattr(getattr(cls, name, None), _MARK, None) for name in names}
        cls.toolbox = {name: entry for name, entry in found.items() if entry is not None}

    @property
    def tools(self) -> Sequence[dict[str, Any]]:  # type: ignore[override]
        return [entry.schema for entry in self.toolbox.values()]

    @abstractmethod
    def answer(self, text: str) -> Step | Awaitable[Step]:
        """The final answer, or any other turn without a call."""

    async def step(self, action: str) -> Step:
        try:
            calls = read_calls(action)
        except Unreadable as error:
            return _mistake(Mistake.INVALID, str(error))
        if not calls:
            return await self._run(self.answer, text=spoken(action))
        steps: list[Step] = []
        for call in calls:
            steps.append(await self._make(call))
            if steps[-1].terminated or steps[-1].truncated:
                break
        return steps[0] if len(calls) == 1 else _joined(calls, steps)

    async def _make(self, call: Call) -> Step:
        found = self.toolbox.get(call.name)
        if found is None:
            return _mistake(Mistake.UNKNOWN_TOOL, f"{call.name!r} is none of {', '.join(self.toolbox)}")
        try:
            keywords = found.check(call.arguments)
        except ValueError as error:
            return _mistake(Mistake.BAD_ARGUMENTS, str(error))
        try:
            result = await self._run(found.function, self, **keywords)
        except ToolError as error:
            return _mistake(Mistake.TOOL_ERROR, str(error))
        if isinstance(result, Step):
            return result
        return Step(Message("tool", result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)))

    async def _run(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*arguments, **keywords)
        return await self.in_thread(lambda: function(*arguments, **keywords))

    def random_action(self, rng: random.Random) -> str:
        """A call of any tool with its required arguments made up; now and then a digit as the answer."""
        if not self.toolbox or rng.random() < 0.2:
            return super().random_action(rng)
        name = rng.choice(sorted(self.toolbox))
        parameters = self.toolbox[name].schema["function"]["parameters"]
        required = parameters.get("required", ())
        return write_call(name, **{key: _made_up(parameters["properties"][key], rng) for key in required})


def _made_up(schema: dict[str, Any], rng: random.Random) -> Any:
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kinds: dict[str, Any] = {
        "integer": rng.randrange(10), "number": rng.uniform(0, 10), "boolean": rng.random() < 0.5, "array": [],
        "object": {}, "null": None,
    }  # fmt: skip
    return kinds.get(schema.get("type", "string"), rng.choice("abcdefghij"))


def _mistake(kind: Mistake, message: str) -> Step:
    return Step(Message("tool", f"error: {message}"), error=kind)


def _joined(calls: Sequence[Call], steps: Sequence[Step]) -> Step:
    """One step of several: the answers in order, rewards summed, the last end, the first mistake."""
    rewards = [step.reward for step in steps if step.reward is not None]
    lines = (f"{call.name}: {step.observation.content}" for call, step in zip(calls, steps, strict=False))
    return replace(
        steps[-1],
        observation=Message("tool", "\n".join(lines)),
        reward=sum(rewards) if rewards else None,
        info={key: value for step in steps for key, value in step.info.items()},
        error=next((step.error for step in steps if step.error is not None), None),
    )
