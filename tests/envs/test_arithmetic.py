"""The calculator's arithmetic: exact, and not to be misused."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.arithmetic import ArithmeticMistake, evaluate, shown

NUMBERS = st.decimals(min_value=0, max_value=10**6, places=3)


@given(NUMBERS, NUMBERS, NUMBERS, st.sampled_from("+-*"), st.sampled_from("+-*"))
def test_it_is_exact_and_knows_what_binds_tighter(a, b, c, one, two) -> None:
    x, y, z = (f"Fraction('{number}')" for number in (a, b, c))
    assert evaluate(f"{a} {one} {b} {two} {c}") == eval(f"{x} {one} {y} {two} {z}")
    assert evaluate(f"({a} {one} {b}) {two} -{c}") == eval(f"({x} {one} {y}) {two} -{z}")


@given(st.text("0123456789.+-*/() ", max_size=60) | st.text(max_size=30))
def test_any_text_is_a_value_or_a_mistake(text: str) -> None:
    with suppress(ArithmeticMistake):
        assert isinstance(evaluate(text), Fraction)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1 / 0", "division by zero"),
        ("9 ** 9 ** 9", "no expression"),
        ("7 // 2", "no expression"),
        ("1e999999999", "nothing else"),
        ("__import__('os')", "nothing else"),
        ("", "nothing else"),
        ("2 3", "no expression"),
        ("(" * 150, "no expression"),
        ("-" * 199 + "1", None),
        ("1" * 201, "at most 200"),
    ],
)
def test_what_can_not_be_calculated_is_refused(text: str, why: str | None) -> None:
    if why is None:
        assert evaluate(text) == -1
        return
    with pytest.raises(ArithmeticMistake, match=why):
        evaluate(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(1, 3), "0.3333"),
        (Fraction(-5, 2), "-2.5"),
        (Fraction(100), "100"),
        (Fraction(-1, 10**9), "0"),
        (Fraction(10**190), "1" + "0" * 190),
    ],
)
def test_a_display_rounds_and_drops_zeros(value: Fraction, text: str) -> None:
    assert shown(value) == text
