"""Reads dictionaries in the format of dictd: an index of headwords, and a compressed file of their entries."""

from __future__ import annotations

import gzip
import string
from collections.abc import Iterator
from pathlib import Path

_DIGITS = {c: at for at, c in enumerate(string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/")}


def entries(directory: Path, name: str) -> Iterator[tuple[str, str]]:
    """Each entry once, in order, with the headword that it begins with, or else its first in the index."""
    content = gzip.decompress((directory / f"{name}.dict.dz").read_bytes())
    headwords: dict[tuple[int, int], list[str]] = {}
    for line in (directory / f"{name}.index").read_text("utf-8").splitlines():
        headword, at, size = line.split("\t")[:3]
        if not headword.startswith("00"):  # what the dictionary says about itself
            headwords.setdefault((_number(at), _number(size)), []).append(headword)
    for (start, length), words in sorted(headwords.items()):
        entry = content[start : start + length].decode("utf-8", "replace")
        beginning = entry.lstrip().casefold()
        yield next((word for word in words if beginning.startswith(word.casefold())), words[0]), entry


def _number(text: str) -> int:
    value = 0
    for character in text:
        value = value * 64 + _DIGITS[character]
    return value
