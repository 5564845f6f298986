"""The tree of an agent's turns: where a history belongs, how its drift is named, which branch is trained."""

from __future__ import annotations

import pytest

from rl.recorder import versions_of
from rl.sessions import Drift, History, Recording, Said, SaidCall, Turn, branches, chosen, columns, drifts, transcript
from rl.trajectory import Message

U, V = Said("user", "one"), Said("user", "two")
THOUGHT = Said("assistant", "<think>\nhm\n</think>\n\nyes")
CALL = Said("assistant", "", (SaidCall("add", '{"a": 1, "b": 2}'),))
PLAIN = Said("assistant", "yes")


def record(recording: Recording, asked: History, answer: Said | str, tools: str = "", tokens: int = 2) -> Turn:
    place = recording.locate(tools, asked)
    history = asked + answer if isinstance(asked, str) else (*asked, answer)
    return recording.add(
        place, tools, asked, history, prompt=[9] * (len(asked) - place.known), token_ids=[1] * tokens,
        logprobs=[-1.0] * tokens, versions=[4] * tokens, said=[Message("user", "?")], text="!", finish_reason="stop",
        start=0.0, end=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "next_one", "drift"),
    [
        (THOUGHT, (U, THOUGHT, V), None),
        (THOUGHT, (U, PLAIN, V), Drift.DROPPED_THINKING),
        (PLAIN, (U, Said("assistant", "yes\n"), V), Drift.WHITESPACE),
        (PLAIN, (Said("user", " one"), PLAIN, V), Drift.WHITESPACE),
        (PLAIN, (U, Said("assistant", "no"), V), Drift.REWRITTEN),
        (PLAIN, (V, PLAIN, V), Drift.REWRITTEN),
        (PLAIN, (PLAIN, V), Drift.TRUNCATED),
        (PLAIN, (V,), Drift.NEW_CONVERSATION),
        (PLAIN, (U,), Drift.RESAMPLED),
        (CALL, (U, Said("assistant", "", (SaidCall("add", '{"b":2,"a":1}'),)), V), None),
        (CALL, (U, Said("assistant", "", (SaidCall("add", '{"a": 1, "b": 2.0}'),)), V), Drift.CHANGED_CALLS),
        (CALL, (U, Said("assistant", ""), V), Drift.CHANGED_CALLS),
        (CALL, (U, PLAIN, V), Drift.REWRITTEN),
    ],
)
def test_a_drift_has_its_name(answer: Said, next_one: tuple[Said, ...], drift: Drift | None) -> None:
    recording = Recording()
    record(recording, (U,), answer)
    turn = record(recording, next_one, PLAIN)
    assert (turn.drift, turn.parent) == (drift, 0 if drift is None else None)


def test_tools_belong_to_a_history() -> None:
    recording = Recording()
    record(recording, (U,), PLAIN, "some")
    assert record(recording, (U, PLAIN, V), PLAIN, "others").drift is Drift.CHANGED_TOOLS
    assert record(recording, (U, PLAIN, V), PLAIN, "some").drift is None
    assert record(recording, (U, PLAIN, U), PLAIN, "some").drift is Drift.FORKED


def test_text_goes_on_where_it_begins_with_what_was_said() -> None:
    recording = Recording()
    record(recording, "once", " upon", "text")
    assert record(recording, "once upon a time", ".", "text").parent == 0
    assert record(recording, "once  upon a time", ".", "text").drift is Drift.REWRITTEN
    assert record(recording, "on ce upon a", ".", "text").drift is Drift.WHITESPACE
    assert record(recording, "never", ".", "text").drift is Drift.NEW_CONVERSATION


def test_the_branch_with_the_most_sampled_tokens_is_trained_and_each_token_once() -> None:
    recording = Recording()
    record(recording, (U,), PLAIN)
    record(recording, (U, PLAIN, V), THOUGHT, tokens=3)
    record(recording, (V,), PLAIN, tokens=4)
    record(recording, (U, PLAIN, U), PLAIN, tokens=3)
    turns = recording.turns
    assert [[turn.number for turn in branch] for branch in branches(turns)] == [[0, 1], [2], [0, 3]]
    branch = chosen(turns)
    assert [turn.number for turn in branch] == [0, 3], "of equals the latest"
    row = columns(branch)
    assert row.token_ids == [9, 1, 1, 9, 1, 1, 1] and row.loss_mask == [0, 1, 1, 0, 1, 1, 1]
    assert row.versions == [-1, 4, 4, -1, 4, 4, 4] and row.logprobs[0] == 0.0
    assert recording.tokens(recording.locate("", (U, PLAIN, V))) == [9, 1, 1]
    assert [m.role for m in transcript(branch)] == ["user", "assistant"] * 2
    assert drifts(turns) == {"forked": 1, "new_conversation": 1}
    assert chosen([]) == []


def test_versions_follow_their_spans() -> None:
    assert versions_of([(0, 3), (2, 4)], 5) == [3, 3, 4, 4, 4]
    assert versions_of([], 0) == []
