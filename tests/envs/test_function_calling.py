"""Function calling: a transcript, BFCL's own solutions and its own verdicts, and calls that would harm the worker."""

from __future__ import annotations

import importlib
import random
from functools import cache
from typing import Any

import pytest

from envs.check import Subject, examine
from envs.data import bfcl
from envs.episodes import expert, play
from envs.function_calling import FunctionCalling
from envs.protocol import Mistake, in_split
from envs.tools import Call, read_calls, write_call
from rl.errors import ConfigError
from rl.stream import derive_seed
from rl.trajectory import Message, Problem


def problem(seed: int, split: str = "train") -> Problem:
    return Problem(0, "test", 0, derive_seed("test", seed), split)


def of_task(number: int, category: str = "base", **options: Any) -> FunctionCalling:
    """An environment whose only task is that one."""
    environment = FunctionCalling(category, **options)
    environment._tasks = [task for task in environment._tasks if task.number == number]
    return environment


async def opened(number: int, category: str = "base", **options: Any) -> FunctionCalling:
    environment = of_task(number, category, **options)
    await environment.reset(problem(0, "train" if in_split(number, "train") else "heldout"))
    return environment


def calls(*pairs: tuple[str, dict[str, Any]]) -> str:
    return "\n".join(write_call(name, **arguments) for name, arguments in pairs)


async def test_transcript() -> None:
    episode = await play(FunctionCalling(requests=3), problem(10), expert, 10)
    assert episode.messages == [
        Message(
            "user", "Explore 'ResearchDocs' to find second files or subdirectories that contain the keyword 'draft'."
        ),
        Message("assistant", calls(("find", {"path": "ResearchDocs", "name": "draft"}))),
        Message("tool", '{"matches": ["ResearchDocs/draft_notes.txt", "ResearchDocs/summary_draft.docx"]}'),
        Message("assistant", "Done."),
        Message(
            "user",
            "Make a copy of summary_draft.docx, name it ultimate_draft.docx and put it in ResearchDocs directory",
        ),
        Message(
            "assistant",
            calls(
                ("cd", {"folder": "ResearchDocs"}),
                ("cp", {"source": "summary_draft.docx", "destination": "ultimate_draft.docx"}),
            ),
        ),
        Message(
            "tool",
            'cd: {"current_working_directory": "ResearchDocs"}\n'
            "cp: {\"result\": \"'summary_draft.docx' copied to 'ultimate_draft.docx'\"}",
        ),
        Message("assistant", "Done."),
        Message("user", "done: 2 of 2"),
    ]
    assert episode.reward == 1.0
    assert episode.steps[-1].info == {"task": "base_45", "done": 2, "requests": 2}


@pytest.mark.parametrize("category", bfcl.CATEGORIES)
async def test_the_solutions_of_bfcl_solve_its_tasks(category: str) -> None:
    solvable = FunctionCalling(category)._tasks
    assert len(solvable) >= 198
    for task in solvable[::9]:
        environment = of_task(task.number, category)
        split = "train" if in_split(task.number, "train") else "heldout"
        episode = await play(environment, problem(0, split), expert, 2 * len(task.requests))
        assert (episode.reward, [step.error for step in episode.steps if step.error]) in (
            (1.0, []),
            (1.0, [Mistake.TOOL_ERROR]),  # some solutions try before they know
        ), task.number
        await environment.close()


@cache
def official() -> Any:
    """BFCL's own judge."""
    bfcl.tasks("base")
    return importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker").multi_turn_checker


def disturbed(task: bfcl.Task, rng: random.Random) -> list[list[Call]]:
    """The solution, perhaps with a call too few, too many, moved to another turn or with another argument."""
    turns = [list(turn) for turn in task.solutions]
    turn = rng.choice([turn for turn in turns if turn])
    at = rng.randrange(len(turn))
    match rng.randrange(6):
        case 0:
            del turn[at]
        case 1:
            turn.insert(at, turn[at])
        case 2:
            rng.choice(turns).append(turn.pop(at))
        case 3:
            turn.reverse()
        case 4:
            changed = {key: "x" if isinstance(value, str) else value for key, value in turn[at].arguments.items()}
            turn[at] = Call(turn[at].name, changed)
    return turns


async def test_verdicts_are_those_of_bfcl() -> None:
    """On solutions that were disturbed, judged here by playing them and there by BFCL's program."""
    rng, verdicts = random.Random(0), []
    for task in FunctionCalling()._tasks[::4]:
        script = disturbed(task, rng)
        environment = await opened(task.number)
        step = None
        for turn in script:
            if turn:
                await environment.step(calls(*((call.name, call.arguments) for call in turn)))
            step = await environment.step("Done.")
            if step.terminated:
                break
        await environment.close()
        assert step is not None and step.terminated
        verdict = official()(
            [[[written(call) for call in turn]] if turn else [] for turn in script],
            [[written(call) for call in turn] for turn in task.solutions],
            {
                "id": f"multi_turn_base_{task.number}",
                "initial_config": task.scenario,
                "involved_classes": list(task.simulators),
            },
            "multi_turn_base",
            "tested",
        )
        assert (step.reward == 1.0) == verdict["valid"], (task.number, verdict.get("error_type"))
        verdicts.append(verdict["valid"])
    assert 10 < sum(verdicts) < len(verdicts) - 10


def written(call: Call) -> str:
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


async def test_a_request_that_was_not_done_ends_the_episode() -> None:
    for credit, reward in (("all", 0.0), ("share", 0.5)):
        environment = await opened(45, credit=credit)
        await environment.step(environment.expert_action())
        assert (await environment.step("I found two.")).observation.content.startswith("Make a copy")
        step = await environment.step("I copied it.")
        assert (step.reward, step.terminated, step.info["done"]) == (reward, True, 1)


async def test_calls_beside_those_that_are_needed_do_no_harm() -> None:
    environment = await opened(20)
    aside = calls(("pwd", {}), ("ls", {"a": True}), ("cd", {"folder": "nowhere"}))
    solution = calls(*((call.name, call.arguments) for call in environment._task.solutions[0]))
    await environment.step(aside)
    await environment.step(solution)
    assert (await environment.step("The last line is about a fox.")).observation.content.startswith("Write the diff")


async def test_a_function_that_arrives_late_can_not_be_called_before() -> None:
    environment = await opened(46, "miss_func")
    assert "rm" not in [tool["function"]["name"] for tool in environment.tools]
    early = await environment.step(calls(("rm", {"file_name": "Drafts"})))
    assert early.error == Mistake.UNKNOWN_TOOL
    arrival = await environment.step("I have nothing to remove files with.")
    assert arrival.observation.content.startswith("These functions can be called from now on, too; try again:\n{")
    assert "rm" in [tool["function"]["name"] for tool in environment.tools]
    await environment.step(environment.expert_action())
    assert (await environment.step("Done.")).reward == 1.0


@pytest.mark.parametrize(
    ("call", "answer", "error"),
    [
        (("mean", {"numbers": 3}), "error: numbers must be of type array", Mistake.BAD_ARGUMENTS),
        (("mean", {}), "error: numbers is missing", Mistake.BAD_ARGUMENTS),
        (("mean", {"list": []}), "error: list is none of numbers", Mistake.BAD_ARGUMENTS),
        (("add", {"a": True, "b": 1}), "error: a must be of type number", Mistake.BAD_ARGUMENTS),
        (("power", {"base": 9e9, "exponent": 10**9}), "exponent must be at most 1000", Mistake.TOOL_ERROR),
        (("square_root", {"number": 2, "precision": 10**9}), "precision must be at most 100", Mistake.TOOL_ERROR),
        (("mean", {"numbers": ["a"]}), '{"error": "All elements in the list must be numbers"}', None),
        (("add", {"a": 1, "b": 2}), '{"result": 3}', None),
    ],
)
async def test_calls_are_checked(call: tuple[str, dict[str, Any]], answer: str, error: str | None) -> None:
    step = await (await opened(47)).step(calls(call))
    assert step.error == error
    assert answer in step.observation.content


async def test_the_precision_of_a_call_stays_in_the_call() -> None:
    mpmath = pytest.importorskip("mpmath")
    before = mpmath.mp.dps
    step = await (await opened(57)).step(calls(("logarithm", {"value": 630, "base": 10, "precision": 5})))
    assert "2.7993393" in step.observation.content
    assert mpmath.mp.dps == before


async def test_it_keeps_the_promises_of_an_environment() -> None:
    findings = await examine(Subject(lambda: FunctionCalling("miss_param"), max_turns=20, problems=15))
    assert [f for f in findings if not f.ok] == []
    (scored,) = (f.found for f in findings if f.name == "scores")
    assert scored == "at random 0.00, expert 1.00"


def test_variants_of_one_conversation_are_in_one_split_and_requests_are_a_knob() -> None:
    for category in bfcl.CATEGORIES:
        numbers = [task.number for task in FunctionCalling(category)._tasks]
        assert len(numbers) == len(set(numbers)) and set(numbers) <= set(range(200))
    lengths = {len(task.requests) for task in FunctionCalling(requests=2)._tasks}
    assert lengths == {1, 2}
    assert len(FunctionCalling(requests=2)._tasks) < len(FunctionCalling()._tasks)


def test_schemas_are_json_schemas() -> None:
    kinds = set()

    def walk(schema: object) -> None:
        if isinstance(schema, dict):
            kinds.update([schema["type"]] if isinstance(schema.get("type"), str) else [])
        for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
            walk(inner)

    for simulator in bfcl.MODULES:
        for schema in bfcl.functions(simulator).values():
            walk(schema["function"]["parameters"])
    assert kinds == {"object", "string", "number", "integer", "array", "boolean"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"category": "hard"}, r"category \('hard'\) must be one of base, miss_param"),
        ({"requests": 0}, r"requests \(0\) leaves no task"),
        ({"credit": "half"}, r"credit \('half'\) must be"),
    ],
)
def test_mistakes_in_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FunctionCalling(**options)


def test_missing_data_is_named_with_the_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    bfcl._root.cache_clear()
    monkeypatch.setattr(bfcl, "_PLACE", tmp_path)
    monkeypatch.setattr(bfcl.importlib.util, "find_spec", lambda _: None)
    try:
        with pytest.raises(ConfigError, match="run `make bfcl`"):
            bfcl._root()
    finally:
        bfcl._root.cache_clear()


def test_an_expert_writes_what_can_be_read() -> None:
    for task in FunctionCalling("long_context")._tasks[::7]:
        for turn in task.solutions:
            text = calls(*((call.name, call.arguments) for call in turn))
            assert read_calls(text) == list(turn)
