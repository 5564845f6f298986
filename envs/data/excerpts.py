"""Writes the excerpts that the package carries from the corpora of this machine: `python -m envs.data.excerpts`.

Invariant: what is chosen does not depend on anything but the corpora, so that equal ones give equal excerpts.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from envs.data.corpus import HOME

COUNTRIES = ("Austria", "Chad", "Cuba", "Egypt", "Fiji", "Iceland", "Japan", "Kenya", "Nepal", "Oman", "Peru", "Togo")
SECTIONS = ("Geography", "Government", "People and Society", "Communications", "Transportation")
CHARACTERS = 1800


def knowledge_search(db: sqlite3.Connection) -> dict[str, Any]:
    """Beginnings of documents about some countries, and some words of the Jargon File: both are in the public domain,
    as the other sources are not."""
    titles = [f"{country}: {section}" for country in COUNTRIES for section in SECTIONS]
    query = f"""SELECT rowid, source, title, substr(text, 1, {CHARACTERS}) FROM documents
        WHERE source = 'factbook' AND title IN ({", ".join("?" * len(titles))}) OR source = 'jargon' AND rowid % 40 = 0
        ORDER BY rowid"""
    rows = db.execute(query, titles).fetchall()
    places = {row[0]: (at, row[3]) for at, row in enumerate(rows, 1)}
    facts = []
    for attribute, subject, value, document, evidence in db.execute(
        "SELECT attribute, subject, value, document, evidence FROM facts ORDER BY id"
    ):
        at, text = places.get(document, (0, ""))
        if evidence in text:
            facts.append((attribute, subject, value, at, evidence))
    return {"documents": [row[1:] for row in rows], "facts": facts}


def shop(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """A fifth of the programs of some sections."""
    rows = db.execute(
        "SELECT name, text, section, size, tags FROM programs "
        "WHERE section IN ('games', 'editors', 'sound', 'graphics') AND id % 5 = 0 ORDER BY id"
    )
    keys = ("name", "text", "section", "size", "tags")
    return [dict(zip(keys, (*row[:-1], row[-1].split()), strict=True)) for row in rows]


def main() -> None:
    for name, choose in (("knowledge_search", knowledge_search), ("shop", shop)):
        db = sqlite3.connect(f"file:{HOME / name}.sqlite?mode=ro", uri=True)
        text = json.dumps(choose(db), ensure_ascii=False, indent=0)
        Path(__file__).with_name(f"{name}.json").write_text(text + "\n", "utf-8")
        db.close()


if __name__ == "__main__":
    main()
