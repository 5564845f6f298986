"""Tool calls: what is read, what is refused by name, and what a tool environment does with it."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from envs.protocol import Mistake, Step
from envs.tools import Call, Tool, ToolEnvironment, ToolError, Unreadable, read_calls, tool, write_call
from rl.trajectory import Message, Problem

PROBLEM = Problem(0, "shelf", 0, 7)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


class Shelf(ToolEnvironment):
    """Take books, then say how many were taken."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    async def reset(self, problem: Problem) -> list[Message]:
        return [Message("user", "take books")]

    @tool
    def take(self, title: Annotated[str, Field(description="Its title.")], copies: int = 1) -> str:
        """Take copies of a book."""
        if copies < 1:
            raise ToolError(f"can not take {copies}")
        self.taken += [title] * copies
        return f"took {copies}"

    @tool
    async def look(self, where: Literal["left", "right"]) -> dict[str, int]:
        """Look at one side."""
        return {where: len(self.taken)}

    @tool
    def leave(self) -> Step:
        """Leave the library."""
        return Step(Message("tool", "bye"), reward=0.5, terminated=True)

    @tool
    def burn(self) -> str:
        """Has a bug."""
        raise ZeroDivisionError("a bug")

    def answer(self, text: str) -> Step:
        return Step(Message("user", "done"), float(text == str(len(self.taken))), terminated=True)


@given(
    st.lists(
        st.tuples(st.text(min_size=1), st.dictionaries(st.text(), JSON, max_size=3)),
        min_size=1,
        max_size=3,
    )
)
def test_what_is_written_is_read_whatever_the_arguments_hold(calls: list[tuple[str, dict]]) -> None:
    turn = "\n".join(write_call(name, **arguments) for name, arguments in calls)
    assert read_calls(turn) == [Call(name, arguments) for name, arguments in calls]


@given(st.text())
def test_any_text_is_read_or_refused_by_name(text: str) -> None:
    for turn in (text, f"<tool_call>{text}</tool_call>", f"{write_call('a')}{text}"):
        with suppress(Unreadable):
            read_calls(turn)


def test_text_before_a_call_and_calls_in_thinking_are_no_calls() -> None:
    assert read_calls(f"<think>{write_call('a')}</think>\nI look it up. {write_call('b', x='</tool_call>')}") == [
        Call("b", {"x": "</tool_call>"})
    ]
    assert read_calls(f"<think>{write_call('a')}</think> 42") == []


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        ("<tool_call>", "one JSON object"),
        ("</tool_call>", "without <tool_call>"),
        ("</tool_call>" + write_call("a"), "without <tool_call>"),
        ("<tool_call>{}</tool_call>", "nothing else"),
        ('<tool_call>{"name": "a"}</tool_call>', "nothing else"),
        ('<tool_call>{"name": "a", "arguments": {}, "id": 1}</tool_call>', "nothing else"),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', "is a string"),
        ('<tool_call>{"name": "a", "arguments": "{}"}</tool_call>', "are an object"),
        ('<tool_call>{"name": "a", "arguments": {}}', "ends with"),
        ('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN is not JSON"),
        ('<tool_call>{"name": "a", "arguments": {"x": 1, "x": 2}}</tool_call>', "twice"),
        ('<tool_call>{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>", "one JSON object"),
        ("<tool_call>" + "[" * 100_000, "one JSON object"),
        (write_call("a") + " so it is 42", "only further calls"),
    ],
)
def test_an_unreadable_turn_is_refused_with_the_reason(turn: str, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        read_calls(turn)


def test_the_schema_of_a_tool_is_its_signature() -> None:
    take = next(schema["function"] for schema in Shelf().tools if schema["function"]["name"] == "take")
    assert take == {
        "name": "take",
        "description": "Take copies of a book.",
        "parameters": {
            "type": "object",
            "properties": {
                "title": {"type": "string", "description": "Its title."},
                "copies": {"type": "integer", "default": 1},
            },
            "required": ["title"],
            "additionalProperties": False,
        },
    }
    assert [s["function"]["name"] for s in Shelf().tools] == ["take", "look", "leave", "burn"]


def test_a_tool_says_what_it_does_and_takes() -> None:
    def silent(self, x: int): ...

    def untyped(self, x):
        """Does."""

    def loose(self, *x: int):
        """Does."""

    for method, why in ((silent, "no docstring"), (untyped, "'x' needs"), (loose, "'x' needs")):
        with pytest.raises(TypeError, match=why):
            Tool.of(method)


@pytest.mark.parametrize(
    ("action", "answer", "error"),
    [
        (write_call("take", title="Emma"), "took 1", None),
        (write_call("take", title="Emma", copies=2), "took 2", None),
        (write_call("look", where="left"), '{"left": 0}', None),
        (write_call("steal"), "error: 'steal' is none of take, look, leave, burn", Mistake.UNKNOWN_TOOL),
        (write_call("take"), "error: title: Field required", Mistake.BAD_ARGUMENTS),
        (write_call("take", title="a", copies="2"), "error: copies: Input should be a valid integer", "bad_arguments"),
        (write_call("take", title="a", page=1), "error: page: Extra inputs are not permitted", "bad_arguments"),
        (write_call("look", where="up"), "error: where: Input should be 'left' or 'right'", "bad_arguments"),
        (write_call("take", title="a", copies=0), "error: can not take 0", Mistake.TOOL_ERROR),
        ("</tool_call>", "error: </tool_call> without <tool_call>", Mistake.INVALID),
    ],
)  # fmt: skip
async def test_a_call_is_answered_and_a_mistake_named(action: str, answer: str, error: str | None) -> None:
    step = await Shelf().step(action)
    assert (step.observation, step.error) == (Message("tool", answer), error)
    assert step.reward is None and not step.terminated


async def test_several_calls_are_made_in_order_until_the_episode_ends() -> None:
    shelf = Shelf()
    turn = "".join([write_call("take", title="a"), write_call("x"), write_call("leave"), write_call("take", title="b")])
    step = await shelf.step(turn)
    assert step.observation.content == "take: took 1\nx: error: 'x' is none of take, look, leave, burn\nleave: bye"
    assert (step.reward, step.terminated, step.error) == (0.5, True, "unknown_tool")
    assert shelf.taken == ["a"]


async def test_a_turn_that_can_not_be_read_whole_does_nothing() -> None:
    shelf = Shelf()
    assert (await shelf.step(write_call("take", title="a") + "<tool_call>")).error == "invalid"
    assert not shelf.taken


async def test_plain_text_is_the_answer_without_its_thinking() -> None:
    shelf = Shelf()
    await shelf.step(write_call("take", title="a"))
    assert (await shelf.step("<think>one book</think>\n1")).reward == 1.0


async def test_a_bug_of_a_tool_is_no_mistake_of_the_policy() -> None:
    with pytest.raises(ZeroDivisionError):
        await Shelf().step(write_call("burn"))


async def test_tools_may_depend_on_the_problem() -> None:
    class Chosen(Shelf):
        async def reset(self, problem: Problem) -> list[Message]:
            self.toolbox = {"take": self.toolbox["take"]}
            return await super().reset(problem)

    chosen = Chosen()
    await chosen.reset(PROBLEM)
    assert [schema["function"]["name"] for schema in chosen.tools] == ["take"] and len(Chosen().tools) == 4
    assert (await chosen.step(write_call("leave"))).error == Mistake.UNKNOWN_TOOL


async def test_a_random_action_is_well_formed() -> None:
    rng, kinds = random.Random(0), set()
    for _ in range(100):
        action = Shelf().random_action(rng)
        for call in read_calls(action):
            kinds.add(call.name)
            assert Shelf().toolbox[call.name].check(json.loads(json.dumps(call.arguments))) is not None
    assert kinds == {"take", "look", "leave", "burn"}
