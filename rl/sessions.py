"""What an agent's session recorded: a tree of turns.

    start ── turn 0 ── turn 1 ── turn 2        a branch is the way from the start to a leaf
                   └── turn 3 ── turn 4        from here on the agent had told the history otherwise

An agent sends its whole history with every request. What continues a recorded history, item by item, is appended to
the tokens of that history; whatever else it sends begins a branch behind the longest recorded history that it does
continue, and the kind of its drift is named and counted.

Invariants
- A turn never changes, and its tokens are the ones that the model saw and sampled: along a branch nothing is ever
  tokenised twice, nothing is left out, and nothing is joined that was not sampled in that order.
- What the agent sent is compared as it means, not as it looks: arguments of a tool call are compared as JSON.
- Of the branches of a session one is trained, the one with the most sampled tokens (of equals, the latest). So
  each sampled token is trained once at most, and what a side conversation says is context of nothing.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rl.calls import THOUGHT
from rl.recorder import Recorder
from rl.trajectory import Message


@dataclass(frozen=True, slots=True)
class SaidCall:
    """One tool call in a message. `arguments` is the JSON text as it was written."""

    name: str
    arguments: str = field(compare=False)
    meaning: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            meaning = json.dumps(json.loads(self.arguments), sort_keys=True)
        except (ValueError, RecursionError):
            meaning = self.arguments
        object.__setattr__(self, "meaning", meaning)


@dataclass(frozen=True, slots=True)
class Said:
    """One message of a chat; `role` is system, user, assistant or tool."""

    role: str
    content: str
    calls: tuple[SaidCall, ...] = ()


History = tuple[Said, ...] | tuple[int, ...] | str
"""What an agent may send: a chat, tokens, or text."""


class Drift(StrEnum):
    """How a history differs from what was recorded."""

    RESAMPLED = "resampled"
    """The same history once more: another answer was asked for."""
    FORKED = "forked"
    """It goes on from an earlier point than the newest."""
    NEW_CONVERSATION = "new_conversation"
    """It has nothing in common with what was recorded: a conversation beside the first."""
    CHANGED_TOOLS = "changed_tools"
    DROPPED_THINKING = "dropped_thinking"
    """A turn of the model came back without its thinking."""
    WHITESPACE = "whitespace"
    """A message came back with other spaces or lines."""
    CHANGED_CALLS = "changed_calls"
    """A turn of the model came back with other tool calls."""
    TRUNCATED = "truncated"
    """Messages were left out."""
    REWRITTEN = "rewritten_history"
    """A message came back with another content."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation with what was added for it. Columns as in `rl.trajectory`."""

    number: int
    parent: int | None
    prompt: list[int]
    """Tokens between the parent's last and the first sampled one."""
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    said: list[Message]
    """The messages that the prompt holds."""
    text: str
    """What the model said."""
    finish_reason: str
    start: float
    end: float
    """When it was asked for and when its result was there, in seconds since the epoch."""
    drift: Drift | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a history belongs: behind `parent`, which holds its first `known` items."""

    parent: int | None
    known: int


@dataclass(frozen=True, slots=True)
class _Key:
    """What the next history is compared with."""

    tools: Hashable
    asked: History
    history: History
    """`asked` and the answer, as the agent was told it."""


class Recording:
    """The turns of one session, on the side that records them."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._keys: list[_Key] = []

    def locate(self, tools: Hashable, asked: History) -> Place:
        """Behind the longest recorded history that this one continues (the latest of equals)."""
        best = Place(None, 0)
        for turn, key in zip(self.turns, self._keys, strict=True):
            if key.tools == tools and best.known <= len(key.history) and _starts(asked, key.history):
                best = Place(turn.number, len(key.history))
        return best

    def tokens(self, place: Place) -> list[int]:
        """What the model saw and sampled up to there."""
        return columns(path(self.turns, place.parent)).token_ids if place.parent is not None else []

    def add(self, place: Place, tools: Hashable, asked: History, history: History, **turn: Any) -> Turn:
        """Record a turn (`turn` has its other fields) behind `place`, as `locate` gave it before it was sampled."""
        drift = self._drift(place, tools, asked)
        added = Turn(number=len(self.turns), parent=place.parent, drift=drift, **turn)
        self.turns.append(added)
        self._keys.append(_Key(tools, asked, history))
        return added

    def _drift(self, place: Place, tools: Hashable, asked: History) -> Drift | None:
        if not self.turns:
            return None
        siblings = [key for turn, key in zip(self.turns, self._keys, strict=True) if turn.parent == place.parent]
        if any(key.tools == tools and key.asked == asked for key in siblings):
            return Drift.RESAMPLED
        rest = asked[place.known :]
        answered = isinstance(rest, tuple) and any(isinstance(item, Said) and item.role == "assistant" for item in rest)
        if place.parent is not None and not answered:
            return Drift.FORKED if siblings else None
        others = [key for key in self._keys if key.tools != tools]
        if any(_starts(asked, key.history) for key in others):
            return Drift.CHANGED_TOOLS
        same = [key for key in self._keys if type(key.asked) is type(asked)]
        if isinstance(asked, str):
            return _text_drift(asked, [key for key in same if isinstance(key.history, str)])
        chats = [key.history for key in same if isinstance(key.history, tuple)]
        return _drift(asked, chats)


def _starts(history: History, beginning: History) -> bool:
    return type(history) is type(beginning) and history[: len(beginning)] == beginning


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the common beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _text_drift(asked: str, keys: Sequence[_Key]) -> Drift:
    for key in keys:
        if isinstance(key.asked, str) and asked.startswith(key.asked):
            return Drift.REWRITTEN
    if any(isinstance(key.history, str) and _squeezed(asked).startswith(_squeezed(key.history)) for key in keys):
        return Drift.WHITESPACE
    return Drift.NEW_CONVERSATION


def _drift(asked: tuple[Any, ...], recorded: Sequence[tuple[Any, ...]]) -> Drift:
    """Of a chat or of tokens that continue nothing: by the first item in which they differ from the closest."""
    if not recorded:
        return Drift.NEW_CONVERSATION
    closest = max(reversed(recorded), key=lambda history: _common(asked, history))
    at = _common(asked, closest)
    if not (asked and isinstance(asked[0], Said)):
        return Drift.REWRITTEN if at else Drift.NEW_CONVERSATION
    if at == len(asked):
        return Drift.FORKED
    last = max((i for i, said in enumerate(asked) if said.role == "assistant"), default=-1)
    told = asked[: last + 1]
    if told and any(_within(told, history) for history in recorded):
        return Drift.TRUNCATED
    if at == len(closest):
        return Drift.REWRITTEN
    was, now = closest[at], asked[at]
    if was.role == now.role and _squeezed(was.content) == _squeezed(now.content):
        return Drift.CHANGED_CALLS if was.calls != now.calls else Drift.WHITESPACE
    if was.role == now.role == "assistant" and THOUGHT in was.content:
        without = was.content.rpartition(THOUGHT)[2]
        if _squeezed(without) == _squeezed(now.content) and was.calls == now.calls:
            return Drift.DROPPED_THINKING
    return Drift.REWRITTEN if told else Drift.NEW_CONVERSATION


def _within(some: Sequence[object], all_: Sequence[object]) -> bool:
    """Whether `some` are among `all_`, in their order."""
    rest = iter(all_)
    return all(any(item == other for other in rest) for item in some)


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


# -- on the side that trains -----------------------------------------------------------------------------------------


def path(turns: Sequence[Turn], last: int | None) -> list[Turn]:
    """The turns from the start to this one."""
    found = []
    while last is not None:
        found.append(turns[last])
        last = turns[last].parent
    return found[::-1]


def branches(turns: Sequence[Turn]) -> list[list[Turn]]:
    """All ways from the start to a leaf, in the order in which the leaves were sampled."""
    inner = {turn.parent for turn in turns}
    return [path(turns, turn.number) for turn in turns if turn.number not in inner]


def chosen(turns: Sequence[Turn]) -> list[Turn]:
    """The branch that is trained (see above); empty if nothing was sampled."""
    return max(
        branches(turns), key=lambda branch: (sum(len(t.token_ids) for t in branch), branch[-1].number), default=[]
    )


def columns(branch: Sequence[Turn]) -> Recorder:
    """The tokens of a branch with their provenance; its first prompt has length `len(branch[0].prompt)`."""
    record = Recorder()
    for turn in branch:
        record.observed(turn.prompt)
        record.sampled(turn.token_ids, turn.logprobs, turn.versions)
    return record


def transcript(branch: Sequence[Turn]) -> list[Message]:
    """The readable conversation of a branch."""
    return [message for turn in branch for message in (*turn.said, Message("assistant", turn.text))]


def drifts(turns: Sequence[Turn]) -> dict[str, int]:
    """How often which drift occurred."""
    return dict(sorted(Counter(turn.drift.value for turn in turns if turn.drift is not None).items()))
