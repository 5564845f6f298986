"""Reads dictionaries in the format of dictd: an index of headwords, and a compressed file of their entries."""

from __future__ import annotations

import gzip
import string
from collections.abc import Iterator
from pathlib import Path

_DIGITS = {c: at for at, c in enumerate(string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/")}


def entries(directory: Path, name: str) -> Iterator[tuple[str, str]]:
    """Each entry once, by its first headword in the index."""
    content = gzip.decompress((directory / f"{name}.dict.dz").read_bytes())
    seen = set()
    for line in (directory / f"{name}.index").read_text("utf-8").splitlines():
        headword, start, length = line.split("\t")[:3]
        if headword.startswith("00") or (place := (_number(start), _number(length))) in seen:
            continue  # what the dictionary says about itself, or a further headword
        seen.add(place)
        yield headword, content[place[0] : sum(place)].decode("utf-8", "replace")


def _number(text: str) -> int:
    value = 0
    for character in text:
        value = value * 64 + _DIGITS[character]
    return value
