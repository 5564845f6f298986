"""Tool calls as Hermes and Qwen models write them, read from the text of a turn.

    thinking ... </think> some text
    <tool_call>
    {"name": "search", "arguments": {"query": "Ulan Bator"}}
    </tool_call>

Invariant: a turn is read as a whole or not at all; thinking, up to `</think>`, counts as nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn

OPEN, CLOSE, THOUGHT = "<tool_call>", "</tool_call>", "</think>"


class Unreadable(ValueError):
    """A turn is no sequence of tool calls; the message tells the policy why."""


@dataclass(frozen=True)
class Call:
    """One tool call as the policy wrote it."""

    name: str
    arguments: dict[str, Any]


def write_call(name: str, /, **arguments: Any) -> str:
    """The turn that makes one call; for experts and prompts."""
    return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{CLOSE}"


def spoken(action: str) -> str:
    """A turn without its thinking."""
    return action.rpartition(THOUGHT)[2].strip()


def read_calls(action: str) -> list[Call]:
    """The calls of a turn; none if it is an answer. Raises Unreadable."""
    text = spoken(action)
    if OPEN not in text and CLOSE not in text:
        return []
    calls, at = [], text.find(OPEN)
    if at < 0 or CLOSE in text[:at]:
        raise Unreadable(f"{CLOSE} without {OPEN}")
    while at < len(text):
        if not text.startswith(OPEN, at):
            raise Unreadable(f"after a tool call only further calls may follow, found {text[at : at + 20]!r}")
        call, at = _read_object(text, _skip(text, at + len(OPEN)))
        at = _skip(text, at)
        if not text.startswith(CLOSE, at):
            raise Unreadable(f"a tool call ends with {CLOSE}")
        calls.append(call)
        at = _skip(text, at + len(CLOSE))
    return calls


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _read_object(text: str, at: int) -> tuple[Call, int]:
    try:
        found, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"a tool call holds one JSON object: {error}") from error
    if not (isinstance(found, dict) and found.keys() == {"name", "arguments"}):
        raise Unreadable('a tool call is {"name": ..., "arguments": {...}} and nothing else')
    if not (isinstance(found["name"], str) and isinstance(found["arguments"], dict)):
        raise Unreadable("the name of a tool call is a string and its arguments are an object")
    return Call(found["name"], found["arguments"]), end


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_unique)
