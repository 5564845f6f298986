"""Math equivalence: `1/2`, `0.5` and `\\frac{2}{4}` are one answer.

Invariants: what costs nothing comes first (equal text, equal numbers); an answer that is longer or larger than any
sensible one is wrong without being computed; so is one that is too costly to compare. A machine too busy to
compare raises.
"""

from __future__ import annotations

import re
from fractions import Fraction

from rewards.answers import boxed, last_line, reference, tagged
from rewards.protocol import TrajectoryView
from rewards.verifier import Verdict, shared
from rl.serverless import serverless

LONGEST = 500
"""Characters of an answer."""
_HUGE = re.compile(
    r"(?:\^|\*\*)\s*[{(]?\s*[-+]?\s*\d{4,}"  # 2^{10000}
    r"|(?:\^|\*\*)[^\s+*/=,;-]*(?:\^|\*\*)"  # 9^{9^{9}}
    r"|\d{4,}\s*!|!\s*[)}]?\s*!"  # 1000!, (9!)!
)
_NOISE = re.compile(r"\\left|\\right|\\[,;! ]|[\s$]")


@serverless("math", memory_mb=1024, timeout_s=30, requires=["math-verify"])
def math(
    view: TrajectoryView, answer_key: str = "answer", tag: str | None = None, deadline_s: float = 20
) -> dict[str, float]:
    """One part, `math`, 0 or 1. The answer is what `<tag>` holds in the last message; with `tag` None what the last
    `\\boxed{}` holds, else the last line. The right one is `info[answer_key]`.

    Raises VerifierTimeout after `deadline_s` seconds, VerifierCrash.
    """
    right = reference(view, answer_key)
    given = tagged(view.final, tag) if tag is not None else boxed(view.final)
    if given is None and tag is None:
        given = last_line(view.final)
    if right is None or not given:
        return {"math": 0.0}
    return {"math": float(equivalent(right, given, deadline_s))}


def equivalent(right: str, given: str, deadline_s: float) -> bool:
    """Whether two answers, in LaTeX or plain, mean the same. Raises VerifierTimeout, VerifierCrash."""
    if len(given) > LONGEST:
        return False
    plain = _tidy(right), _tidy(given)
    if plain[0] == plain[1]:
        return True
    if _HUGE.search(given):
        return False
    numbers = _number(plain[0]), _number(plain[1])
    if None not in numbers and (numbers[0] == numbers[1] or all(n.denominator == 1 for n in numbers if n is not None)):
        return numbers[0] == numbers[1]
    return shared().compare(right.replace("$", ""), given.replace("$", ""), deadline_s) is Verdict.EQUAL


def _tidy(text: str) -> str:
    return _NOISE.sub("", text).rstrip(".")


def _number(text: str) -> Fraction | None:
    """The value of a plain number or fraction; thousands may be set off by commas."""
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = text.replace(",", "")
    if not re.fullmatch(r"[-+]?(\d+(\.\d+)?|\.\d+|\d+/0*[1-9]\d*)", text):
        return None
    return Fraction(text)
