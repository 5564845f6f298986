"""The catalogue of the shop: programs of Debian's archive with their section, size and debtags.

Invariant: only fields that tell what a program is are kept, none of a version or an upload, so that the catalogue
changes as seldom as the archive's choice of programs does.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envs.data.packages import catalogue
from rl.errors import ConfigError

RECIPE = 1
FACETS = {
    "interface": "interface",
    "implemented-in": "implemented in",
    "uitoolkit": "user-interface toolkit",
    "use": "use",
    "works-with": "works with",
    "works-with-format": "reads or writes the format",
    "protocol": "speaks the protocol",
    "network": "role in a network",
    "field": "field",
    "game": "kind of game",
    "sound": "kind of sound program",
    "security": "kind of security program",
    "web": "kind of web program",
}
"""The debtags facets that are kept, each as a page of the shop calls it."""


def collect(directory: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """All programs with at least two tags of these facets."""
    records = sorted(_programs(catalogue(directory)), key=lambda record: str(record["name"]))
    if len(records) < 1000:
        raise ConfigError(f"the archive describes only {len(records)} programs by tags; the shop needs 1000")
    return records, {"apt": f"{len(records)} programs"}


def _programs(text: str) -> Iterator[dict[str, Any]]:
    seen = set()
    for stanza in text.split("\n\n"):
        fields: dict[str, str] = {}
        for line in stanza.replace("\n ", " ").splitlines():
            key, _, fields[key] = line.partition(": ")
        tags = [tag.strip() for tag in fields.get("Tag", "").split(",")]
        kept = sorted(tag for tag in tags if tag.partition("::")[0] in FACETS and not tag.endswith("::TODO"))
        name, told = fields.get("Package", ""), "Section" in fields and "Description" in fields
        if "role::program" in tags and len(kept) >= 2 and told and name not in seen:
            seen.add(name)
            section, size = fields["Section"].rpartition("/")[2], int(fields.get("Installed-Size", 0))
            yield {"name": name, "text": fields["Description"], "section": section, "size": size, "tags": kept}


def fill(db: sqlite3.Connection, records: list[dict[str, Any]]) -> None:
    """`programs` by name, tags joined by blanks, of which those are `rare` that less than a third of the section has;
    and `search` over what a shop window shows of them: no tags."""
    db.execute("CREATE TABLE programs (id INTEGER PRIMARY KEY, name TEXT UNIQUE, text, section, size, tags, rare)")
    programs = Counter(record["section"] for record in records)
    with_tag = Counter((record["section"], tag) for record in records for tag in record["tags"])
    for record in records:
        section, tags = record["section"], record["tags"]
        rare = [tag for tag in tags if 3 * with_tag[section, tag] < programs[section]]
        row = (record["name"], record["text"], section, record["size"], " ".join(tags), " ".join(rare))
        db.execute("INSERT INTO programs (name, text, section, size, tags, rare) VALUES (?, ?, ?, ?, ?, ?)", row)
    db.execute(
        "CREATE VIRTUAL TABLE search USING fts5 "
        "(name, text, section, content = 'programs', content_rowid = 'id', tokenize = 'porter unicode61')"
    )
    db.execute("INSERT INTO search (search) VALUES ('rebuild')")
