"""Arithmetic as a pocket calculator does it, on text that is not trusted.

Invariant: every text is answered in little time, by an exact value or by an ArithmeticMistake; nothing is executed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

LONGEST = 200
"""Characters of an expression. Values grow no faster than by multiplication, so this bounds the time, too."""
_SIGNS = re.compile(r"[-0-9.+*/() ]+")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class ArithmeticMistake(ValueError):
    """The text can not be calculated; the message says why."""


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression of decimal numbers, + - * / and parentheses. Raises ArithmeticMistake."""
    if len(expression) > LONGEST:
        raise ArithmeticMistake(f"an expression has at most {LONGEST} characters")
    source = expression.strip()
    if not _SIGNS.fullmatch(source):
        raise ArithmeticMistake("an expression has numbers, + - * / and parentheses, and nothing else")
    try:
        return _value(ast.parse(source, mode="eval").body, source)
    except ZeroDivisionError as error:
        raise ArithmeticMistake("division by zero") from error
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ArithmeticMistake(f"{source!r} is no expression") from error


def _value(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_value(left, source), _value(right, source))
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, source)
        case ast.UnaryOp(ast.UAdd(), operand):
            return _value(operand, source)
        case ast.Constant():
            return Fraction(ast.get_source_segment(source, node) or "")  # 0.1 is a tenth, not the nearest float
    raise ValueError("an operator that is not among the four")


def shown(value: Fraction) -> str:
    """A value as a display shows it: rounded to four decimals, without zeros at the end."""
    digits = format(round(float(value), 4) + 0.0, ".4f") if value.denominator > 1 else str(value)
    return digits.rstrip("0").rstrip(".") if "." in digits else digits
