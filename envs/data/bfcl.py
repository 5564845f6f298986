"""The multi-turn tasks of the Berkeley function calling leaderboard, and the simulators that they play in.

Both are read from an unpacked `bfcl-eval`: data, and the eight simulator modules, which need nothing but mpmath. They
pretend: none touches a real file, a network or a process.

Invariants
- A call has the outcome that BFCL's own evaluation gives it, unless it would keep the processor busy for long.
- Calls of all simulations are made one at a time: some set the precision of a whole process, or share long texts.
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import inspect
import json
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from envs.tools import Call
from rl.errors import ConfigError

CATEGORIES = ("base", "miss_param", "miss_func", "long_context")
MODULES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}
"""Module of each simulator, which is also the name of the file that describes its functions."""
LARGEST = {"precision": 100, "exponent": 1000}
"""Beyond these a number takes seconds and megabytes, in which no other episode of the worker moves."""
_JSON_TYPES = {"dict": "object", "float": "number"}
_PLACE = Path(sys.prefix) / "share" / "rollmill" / "bfcl"
_one_at_a_time = threading.RLock()


@dataclass(frozen=True)
class Task:
    """One conversation: what the user asks turn by turn, and the calls that do it."""

    number: int
    """The same in all categories, which vary one set of conversations."""
    category: str
    requests: tuple[str, ...]
    """Empty where nothing is asked but functions withheld until then arrive."""
    solutions: tuple[tuple[Call, ...], ...]
    simulators: tuple[str, ...]
    scenario: Mapping[str, Any]
    withheld: Mapping[int, tuple[str, ...]]
    """Names of functions that become known only in that turn."""
    excluded: tuple[str, ...]
    """Names of functions that are never known."""


class Simulation:
    """The live simulators of one task."""

    def __init__(self, task: Task):
        self._live = {}
        with _one_at_a_time:
            for name in task.simulators:
                self._live[name] = _simulator(name)()
                if hasattr(self._live[name], "_load_scenario"):
                    scenario = copy.deepcopy(task.scenario.get(name, {}))
                    self._live[name]._load_scenario(scenario, long_context=task.category == "long_context")

    def call(self, call: Call) -> tuple[str, bool]:
        """What the function answers, and whether it did (else the text says why not)."""
        simulator = next(live for live in reversed(self._live.values()) if hasattr(live, call.name))
        with _one_at_a_time:
            try:
                for name, largest in LARGEST.items():
                    if abs(call.arguments.get(name, 0)) > largest:
                        raise ValueError(f"{name} must be at most {largest}")
                return _text(getattr(simulator, call.name)(**copy.deepcopy(call.arguments))), True
            except Exception as error:  # as BFCL does: whatever a simulator raises, the call was to blame
                return f"Error during execution: {error}", False
            finally:
                if mpmath := sys.modules.get("mpmath"):
                    mpmath.mp.dps = 15  # or other users of the process would compute with the call's precision

    def equals(self, other: Simulation) -> bool:
        """Whether the public state of every simulator is that of the other's."""
        with _one_at_a_time:
            return all(_public(live) == _public(other._live[name]) for name, live in self._live.items())


def contains_all(found: list[str], wanted: list[str]) -> bool:
    """Whether each wanted answer is among the found ones, as often as it is wanted, in any order."""
    return not Counter(wanted) - Counter(found)


def _public(simulator: object) -> dict[str, Any]:
    return {name: value for name, value in vars(simulator).items() if not name.startswith("_")}


def _text(result: object) -> str:
    if isinstance(result, dict):
        try:
            return json.dumps(result)
        except (TypeError, ValueError):
            return str(result)
    return str(result)


@cache
def functions(simulator: str) -> dict[str, dict[str, Any]]:
    """The schemas of a simulator's functions by name, as chat templates want them."""
    lines = (_root() / "data" / "multi_turn_func_doc" / f"{MODULES[simulator]}.json").read_text().splitlines()
    found = {}
    for row in map(json.loads, lines):
        row.pop("response", None)
        found[row["name"]] = {"type": "function", "function": row | {"parameters": _as_json_schema(row["parameters"])}}
    return found


def _as_json_schema(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_as_json_schema(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {k: _JSON_TYPES.get(v, v) if k == "type" and isinstance(v, str) else _as_json_schema(v)
            for k, v in schema.items()}  # fmt: skip


@cache
def tasks(category: str) -> tuple[Task, ...]:
    """All 200 of a category. Raises ConfigError if the data is not there."""
    name = f"BFCL_v4_multi_turn_{category}.json"
    questions = map(json.loads, (_root() / "data" / name).read_text().splitlines())
    answers = map(json.loads, (_root() / "data" / "possible_answer" / name).read_text().splitlines())
    solutions = {answer["id"]: answer["ground_truth"] for answer in answers}
    return tuple(_task(category, question, solutions[question["id"]]) for question in questions)


def _task(category: str, question: dict[str, Any], solution: list[list[str]]) -> Task:
    simulators = tuple(question["involved_classes"])
    return Task(
        number=int(question["id"].rpartition("_")[2]),
        category=category,
        requests=tuple("\n".join(message["content"] for message in turn) for turn in question["question"]),
        solutions=tuple(tuple(_parsed(text, simulators) for text in turn) for turn in solution),
        simulators=simulators,
        scenario=question["initial_config"],
        withheld={int(turn): tuple(names) for turn, names in question.get("missed_function", {}).items()},
        excluded=tuple(question.get("excluded_function", ())),
    )


def _parsed(source: str, simulators: tuple[str, ...]) -> Call:
    """`sort('a.txt')` as a call with named arguments."""
    node = ast.parse(source.strip(), mode="eval").body
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name), source
    name = node.func.id
    kind = next(_simulator(s) for s in reversed(simulators) if hasattr(_simulator(s), name))
    names = list(inspect.signature(getattr(kind, name)).parameters)[1:]
    arguments = dict(zip(names, map(ast.literal_eval, node.args), strict=False))
    arguments |= {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    return Call(name, arguments)


@cache
def _simulator(name: str) -> type[Any]:
    with _one_at_a_time:
        if (place := str(_root().parent)) not in sys.path:
            sys.path.append(place)
        package = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
        return getattr(importlib.import_module(f"{package}.{MODULES[name]}"), name)


@cache
def _root() -> Path:
    """The directory of the package `bfcl_eval`. Raises ConfigError with the mend."""
    spec = importlib.util.find_spec("bfcl_eval")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    for place in (*places, _PLACE / "bfcl_eval"):
        if (place / "data").is_dir():
            return place
    raise ConfigError(
        "environment function_calling needs the data of bfcl-eval; run `make bfcl`, or "
        f"`pip install --no-deps --target {_PLACE} bfcl-eval==2026.3.23`"
    )
