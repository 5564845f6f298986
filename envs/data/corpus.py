"""Corpora: the read-only SQLite files that environments search, built once per machine from packages.

Beside NAME.sqlite lies NAME.json: the recipe's number, the file's SHA-256, the packages it was made of, and a digest of
its rows, which is equal wherever the same packages were read.

Invariants
- What `find` returns is complete and unchanged: files are made aside and renamed, and their SHA-256 is compared.
- Nothing is fetched but by `build`, which only `rollmill env prepare` calls.
- The excerpt of a corpus, which the package carries, has the same tables and needs no preparation.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rl.errors import ConfigError

HOME = Path(sys.prefix) / "share" / "rollmill" / "corpora"
"""Beside the installed packages, for that is what they are made of: every run and worker of this installation shares
them."""
BUILD_S = 1800.0
EXCERPT = "excerpt"
CORPORA = ("full", EXCERPT)
Fill = Callable[[sqlite3.Connection, Any], None]
"""Makes the tables from records, which are JSON types."""


def connect(name: str, which: str, fill: Fill) -> sqlite3.Connection:
    """A connection that can only read; of the excerpt, to a copy in memory. `find` has seen the other before."""
    if which == EXCERPT:
        db = sqlite3.connect(":memory:")
        db.deserialize(_excerpt(name, fill))
        db.execute("PRAGMA query_only = 1")
        return db
    return sqlite3.connect(f"file:{HOME / name}.sqlite?mode=ro&immutable=1", uri=True)


@contextmanager
def _alone(name: str) -> Iterator[None]:
    lock = FileLock(HOME / f"{name}.lock")
    try:
        lock.acquire(timeout=BUILD_S)
    except Timeout as error:
        raise ConfigError(f"another process has been building the corpus {name} for {BUILD_S:g} s; end it") from error
    try:
        yield
    finally:
        lock.release()


@cache
def _excerpt(name: str, fill: Fill) -> bytes:
    with closing(sqlite3.connect(":memory:")) as db:
        with db:
            fill(db, json.loads(files("envs.data").joinpath(f"{name}.json").read_text("utf-8")))
        return db.serialize()


def find(name: str, recipe: int) -> dict[str, Any]:
    """The manifest of a corpus that is there and whole. Raises ConfigError with the mend."""
    mend = f"run `rollmill env prepare {name}` (a few minutes), or set the option corpus to {EXCERPT!r}"
    file = HOME / f"{name}.sqlite"
    try:
        manifest = json.loads(file.with_suffix(".json").read_text())
        with file.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise ConfigError(f"the corpus {name} is not on this machine ({error.filename}); {mend}") from error
    if manifest["recipe"] != recipe:
        raise ConfigError(f"the corpus {name} is of recipe {manifest['recipe']}, not {recipe}; {mend}")
    if manifest["sha256"] != found:
        raise ConfigError(f"the corpus {name} is damaged ({file} has not the SHA-256 of its manifest); {mend}")
    return dict(manifest)


def build(name: str, recipe: int, collect: Callable[[Path], tuple[Any, dict[str, str]]], fill: Fill) -> dict[str, Any]:
    """Make a corpus unless it is there and whole; its manifest. `collect` gets an empty directory, and returns the
    records and the versions of the packages that it read. Raises ConfigError."""
    HOME.mkdir(parents=True, exist_ok=True)
    with _alone(name):
        try:
            return find(name, recipe)
        except ConfigError:
            draft = HOME / f"{name}.draft"
        shutil.rmtree(draft, ignore_errors=True)  # of one that was killed
        draft.mkdir()
        try:
            records, sources = collect(draft)
            made = draft / "made.sqlite"
            with closing(sqlite3.connect(made)) as db, db:
                db.execute("PRAGMA journal_mode = OFF")
                fill(db, records)
            with made.open("rb") as content:
                sha256 = hashlib.file_digest(content, "sha256").hexdigest()
            digest = hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()
            manifest = {"recipe": recipe, "sha256": sha256, "digest": digest, "sources": sources}
            (draft / "made.json").write_text(json.dumps(manifest, indent=1))
            (HOME / f"{name}.json").unlink(missing_ok=True)
            os.replace(made, HOME / f"{name}.sqlite")
            os.replace(draft / "made.json", HOME / f"{name}.json")
            return manifest
        finally:
            shutil.rmtree(draft)
