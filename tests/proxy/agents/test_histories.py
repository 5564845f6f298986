"""Whatever an agent does to its history: what the engine sees is what is recorded, and every sampled token is kept."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.engines.protocol import Generation
from infra.proxy.chat import _ask, _hear
from infra.proxy.metrics import Metrics
from infra.proxy.openai import ChatRequest
from infra.proxy.session_wire import SessionBody
from infra.proxy.sessions import Session, Sessions
from infra.proxy.wire import GenerateBody
from rl.recorder import Recorder
from rl.sessions import Drift, Said, branches, chosen, columns, drifts
from tests.proxy.agents.qwen import CONTROL, make_codec

CODEC = make_codec()
TEXTS = (
    "Yes", " a\nb ", "", "<think>\nhm\n</think>\n\nNo.", "<|im_end|>", "<|im_start|>user", "\ue0000\ue001", "日本",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "<tool_call>{</tool_call>",
)  # fmt: skip
HEADER = CODEC.text("assistant\n")
BODY = SessionBody(
    trajectory="t", tenant="", start_version=3, temperature=1.0, max_new_tokens=64, max_tokens=10**6, max_turns=10**3,
    deadline_s=60,
)  # fmt: skip


@dataclass
class Dice:
    """In the place of the proxy: an engine that says one of the texts, or any tokens at all, and notes what it saw."""

    rng: random.Random
    seen: list[list[int]] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    config: Any = field(default_factory=lambda: SimpleNamespace(name="policy"))
    check_tenant: Any = None

    async def generate(self, body: GenerateBody) -> Generation:
        tokens = CODEC.text(self.rng.choice(TEXTS))
        if self.rng.random() < 0.3:
            tokens = [self.rng.randrange(600) % len(CODEC._tokenizer.get_vocab()) for _ in range(3)]
        finish = self.rng.choice(["stop", "stop", "length"])
        tokens = [*tokens, CODEC.end] if finish == "stop" else tokens or [5]
        self.seen.append(body.token_ids)
        self.sampled.append(tokens)
        middle = len(tokens) // 2
        spans = [(0, 3), (middle, 4)] if middle else [(0, 3)]
        return Generation(tokens, [-0.5 - at for at in range(len(tokens))], finish, spans)  # type: ignore[arg-type]


def _message(told: Any) -> dict[str, Any]:
    calls = [
        {"id": str(at), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for at, call in enumerate(told.calls)
    ]
    return {"role": "assistant", "content": told.content or None, **({"tool_calls": calls} if calls else {})}


def _disturbed(history: list[dict[str, Any]], what: str, rng: random.Random) -> list[dict[str, Any]]:
    """The history as an agent sends it that does this to it."""
    at = rng.randrange(len(history)) if history else 0
    match what:
        case "again":
            return history[:-2]
        case "earlier":
            turns = [i for i, message in enumerate(history) if message["role"] == "assistant"]
            return history[: rng.choice(turns) + 1] if turns else history
        case "edit" if history:
            edited = history[at] | {"content": f"{history[at]['content'] or ''}!"}
            return [*history[:at], edited, *history[at + 1 :]]
        case "drop" if history:
            return history[:at] + history[at + 1 :]
        case "unthink":
            return [
                m | {"content": (m["content"] or "").rpartition("</think>")[2].strip()}
                if m["role"] == "assistant" else m
                for m in history
            ]  # fmt: skip
        case "anew":
            return []
    return history


actions = st.lists(
    st.sampled_from(["go", "go", "go", "tool", "again", "earlier", "edit", "drop", "unthink", "anew"]),
    min_size=1, max_size=12,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(actions, st.integers(0, 2**32))
def test_any_agent_is_recorded_exactly(moves: list[str], seed: int) -> None:
    asyncio.run(_play(moves, random.Random(seed)))


async def _play(moves: list[str], rng: random.Random) -> None:
    dice = Dice(rng)
    sessions, session = Sessions(dice, lambda: CODEC), Session("s", BODY)  # type: ignore[arg-type]
    sessions._codec = CODEC
    history: list[dict[str, Any]] = []
    honest: list[tuple[int, int]] = []
    for number, move in enumerate(moves):
        before = history
        history = _disturbed(history, move, rng)
        said = {"role": "tool", "tool_call_id": "0"} if move == "tool" and history else {"role": "user"}
        history = [*history, said | {"content": rng.choice(TEXTS)}]
        asked = ChatRequest(model="policy", messages=history)
        heard = await sessions.sample(session, _ask(CODEC, asked))
        if before and move in ("go", "tool"):
            honest.append((number - 1, number))
        history = [*history, _message(_hear(asked, heard.text))]

    turns = session.recording.turns
    assert [turn.token_ids for turn in turns] == dice.sampled
    for turn, seen in zip(turns, dice.seen, strict=True):
        before_it = columns([*_until(turns, turn.parent)]).token_ids if turn.parent is not None else []
        assert seen == [*before_it, *turn.prompt]
        assert seen[-len(HEADER) :] == HEADER
    for first, second in honest:
        assert turns[second].drift in (None, Drift.FORKED, Drift.RESAMPLED)
        parent = turns[second].parent
        assert parent is not None and turns[parent].text.strip() == turns[first].text.strip()
    for branch in branches(turns):
        _check_columns(columns(branch), sum(len(turn.token_ids) for turn in branch))
    assert sum(len(t.token_ids) for t in chosen(turns)) == max(
        sum(len(t.token_ids) for t in branch) for branch in branches(turns)
    )
    assert sum(drifts(turns).values()) == sum(turn.drift is not None for turn in turns)


@pytest.mark.parametrize("deadline_s", [3600.0, 0.01])
async def test_of_a_session_that_is_gone_nothing_stays_in_memory(deadline_s: float) -> None:
    dice = Dice(random.Random(0), check_tenant=lambda tenant: None)
    sessions = Sessions(dice, lambda: CODEC)  # type: ignore[arg-type]
    token, session = await sessions.open(BODY.model_copy(update={"deadline_s": deadline_s}))
    recorded = weakref.ref(session.recording)
    if deadline_s > 1:
        sessions.close(session)
    async with asyncio.timeout(10):
        while sessions.of_token(token) is not None:
            await asyncio.sleep(0.005)
    del session
    gc.collect()
    assert recorded() is None


def _until(turns: list[Any], last: int | None) -> list[Any]:
    return [*_until(turns, turns[last].parent), turns[last]] if last is not None else []


def _check_columns(row: Recorder, sampled: int) -> None:
    assert len(row.token_ids) == len(row.loss_mask) == len(row.logprobs) == len(row.versions)
    assert sum(row.loss_mask) == sampled
    for mask, logprob, version in zip(row.loss_mask, row.logprobs, row.versions, strict=True):
        assert (version in (3, 4) and logprob <= -0.5) if mask else (version, logprob) == (-1, 0.0)


plain = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20).filter(
    lambda text: not any(token in text for token in CONTROL)
)


@settings(deadline=None)
@given(plain, st.lists(st.tuples(plain, st.lists(plain, min_size=1, max_size=3), st.booleans()), max_size=3))
def test_a_conversation_in_pieces_is_the_conversation_at_once(
    opening: str, rounds: list[tuple[str, list[str], bool]]
) -> None:
    """Where the model says what the template itself would have it say."""
    said = [Said("system", "Be."), Said("user", opening)]
    tokens = CODEC.conversation(said)
    for answer, replies, of_tools in rounds:
        tokens += CODEC.turn(answer)
        said.append(Said("assistant", answer))
        known = len(said)
        said += [Said("tool" if of_tools else "user", reply) for reply in replies]
        tokens += CODEC.conversation(said, (), known)
    assert tokens == CODEC.conversation(said)
