"""Whether a short answer in words or digits is the right one.

Invariant: case, accents, punctuation, articles and white space do not count; digits, signs and decimal points do.
"""

from __future__ import annotations

import re
import unicodedata

_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")


def same(given: str, right: str) -> bool:
    """`1,234.0` is `1234`, and `The Côte d'Or.` is `cote d'or`."""
    return _plain(given) == _plain(right)


def _plain(text: str) -> object:
    text = text.strip().removesuffix(".")
    digits = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", text)
    if len(digits) < 40 and _NUMBER.fullmatch(digits) and digits.isascii():
        return float(digits)
    letters = unicodedata.normalize("NFKD", text.casefold())
    words = re.findall(r"[^\W_]+", "".join(c for c in letters if not unicodedata.combining(c)))
    return " ".join(word for word in words if word not in ("the", "a", "an"))
