"""Exact match, format and length: what counts as an answer, and what one that was cut off gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.answers import boxed, last_line
from rewards.exact import exact_match
from rewards.format import format as format_reward
from rewards.length import length
from rewards.protocol import TrajectoryView
from rl.trajectory import Message, Problem, Status


def view(*said: str, status: Status = Status.TERMINATED, tokens: int = 0, **info: object) -> TrajectoryView:
    messages = [Message("user", "q"), *(Message("assistant", text) for text in said), Message("tool", "end")]
    return TrajectoryView(Problem(0, "d", 0, 1), messages, status, len(said), tokens, 0.0, info)


@pytest.mark.parametrize(
    ("said", "right", "expected"),
    [
        ("it is <answer> Paris\n</answer>", "Paris", 1.0),
        ("<answer>Rome</answer> no, <answer>Paris</answer>", "Paris", 1.0),
        ("<answer>Paris</answer> no, <answer>Rome</answer>", "Paris", 0.0),
        ("<answer>New   York</answer>", "New York", 1.0),
        ("<answer>paris</answer>", "Paris", 0.0),
        ("Paris", "Paris", 0.0),
        ("<answer>42</answer>", 42, 1.0),
    ],
)
def test_exact_match(said: str, right: object, expected: float) -> None:
    assert exact_match(view(said, answer=right)) == {"exact_match": expected}


def test_exact_match_of_a_whole_message_and_without_case() -> None:
    assert exact_match(view("x", " paris ", a="Paris"), tag=None, answer_key="a", ignore_case=True) == {
        "exact_match": 1.0
    }


def test_an_episode_that_was_cut_off_has_not_answered() -> None:
    assert exact_match(view("<answer>Paris</answer>", status=Status.TRUNCATED)) == {"exact_match": 0.0}


def test_an_environment_that_tells_no_answer_is_a_mistake_and_not_a_wrong_answer() -> None:
    with pytest.raises(KeyError, match="set answer_key"):
        exact_match(view("<answer>Paris</answer>"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{\frac{1}{2}} ok", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{ 2 }", "2"),
        (r"\boxed{1", None),
        ("nothing", None),
    ],
)
def test_boxed(text: str, expected: str | None) -> None:
    assert boxed(text) == expected


@given(st.text())
def test_the_last_line_is_never_blank_unless_all_are(text: str) -> None:
    assert bool(last_line(text)) == any(line.strip() for line in text.splitlines())


def test_format_is_the_share_of_messages_of_that_shape() -> None:
    pattern = r"<think>.*</think>.+"
    said = view("<think>a\nb</think>go", "<think>c</think>", "d")
    assert format_reward(said, pattern) == {"format": 1 / 3}
    assert format_reward(said, pattern, final_only=True) == {"format": 0.0}
    assert format_reward(view(), pattern) == {"format": 0.0}
    assert format_reward(view("x" * 30_000), ".*") == {"format": 0.0}


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0.0), (100, 0.0), (150, -0.5), (200, -1.0), (1000, -1.0)])
def test_length_falls_between_free_and_limit(tokens: int, expected: float) -> None:
    assert length(view(tokens=tokens), free=100, limit=200) == {"length": expected}


def test_length_without_room_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"free \(200\)"):
        length(view(), free=200, limit=200)
