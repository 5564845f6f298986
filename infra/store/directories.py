"""Directories of files in the store: weights, adapters, optimizer state, the base model.

A directory is its files under one key prefix and `manifest.json`, `{"files": {name: {"sha256", "size"}}}`,
written last; its name is the sha256 of that manifest.

Invariants
- A directory exists exactly when its manifest does: an upload that broke off is never seen.
- What is pulled was verified: every file by size and sha256, the manifest by its own sha256 where it is given.
- A local copy lies in a cache under the manifest's hash and appears there whole, by one rename; two processes
  may pull the same at once.
- A name in a manifest can not point outside of the directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.store.errors import Corrupt, NotFound
from infra.store.objects import PART_BYTES, ObjectStore

T = TypeVar("T")
R = TypeVar("R")

MANIFEST = "manifest.json"
WORKERS = 8


class FileEntry(BaseModel):
    """What one file must be."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size: Annotated[int, Field(ge=0)]


class Manifest(BaseModel):
    """The files of a directory, by POSIX path."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    files: dict[str, FileEntry]


def push_directory(store: ObjectStore, key_prefix: str, directory: Path) -> str:
    """Upload all files below `directory` (links are followed) and then the manifest; returns its sha256.

    `key_prefix` ends with a slash and is used once: `state/{lsn}-{nonce}/`, `base/`. Repeating a push of the
    same files is harmless. Raises ValueError when there is nothing to push, or a file is named manifest.json.
    """
    names = sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    if not names or MANIFEST in names:
        raise ValueError(
            f"{directory}: can not be pushed: " + (f"{MANIFEST} is a reserved name" if names else "no file")
        )

    def push(name: str) -> tuple[str, FileEntry]:
        path = directory / name
        entry = _entry(path)
        store.put_file(key_prefix + name, path)
        return name, entry

    manifest = Manifest(files=dict(_parallel(push, names)))
    body = json.dumps(manifest.model_dump(), sort_keys=True).encode()
    store.put(key_prefix + MANIFEST, body)
    return hashlib.sha256(body).hexdigest()


def read_manifest(store: ObjectStore, key_prefix: str, manifest_sha256: str | None = None) -> tuple[str, Manifest]:
    """The manifest of a directory and its sha256. Raises NotFound (never wholly written) or Corrupt."""
    key = key_prefix + MANIFEST
    body = store.get(key)
    found = hashlib.sha256(body).hexdigest()
    if manifest_sha256 is not None and found != manifest_sha256:
        raise Corrupt(key, f"sha256 {found}, but {manifest_sha256} is named")
    try:
        manifest = Manifest.model_validate_json(body)
    except ValidationError as error:
        raise Corrupt(key, f"not a manifest: {error.error_count()} fields are wrong") from error
    for name in manifest.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or set(name) & {"\\", "\0"} or name == ".":
            raise Corrupt(key, f"unsafe file name {name!r}")
    return found, manifest


def pull_directory(
    store: ObjectStore,
    key_prefix: str,
    manifest_sha256: str | None,
    into: Path,
    only: Sequence[str] | None = None,
) -> Path:
    """A verified local copy, at a path below the cache `into` that depends on the content alone.

    `only` are shell patterns of file names, where `*` crosses slashes ("model/*"): a part is pulled, to a path
    of its own. `manifest_sha256` None trusts the manifest that is there. What is cached already is not read
    again. Treat the copy as read-only. Raises NotFound, Corrupt, or ValueError when `only` matches nothing.
    """
    cached = manifest_sha256 and _cached(into, manifest_sha256, only)
    if cached:
        return cached
    manifest_sha256, manifest = read_manifest(store, key_prefix, manifest_sha256)
    cached = _cached(into, manifest_sha256, only)
    if cached:
        return cached
    wanted = {n: e for n, e in manifest.files.items() if only is None or any(fnmatchcase(n, p) for p in only)}
    if not wanted:
        raise ValueError(f"{key_prefix}: no file matches {only}; there are {', '.join(sorted(manifest.files))}")
    final = into / _cache_name(manifest_sha256, only)
    into.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".pulling-", dir=into))
    try:
        for name in wanted:
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
        _parallel(lambda name: _pull(store, key_prefix + name, wanted[name], draft / name), wanted)
        draft.chmod(0o755)
        try:
            os.replace(draft, final)
        except OSError:
            if not final.is_dir():  # else another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return final


def _cache_name(manifest_sha256: str, only: Sequence[str] | None) -> str:
    if only is None:
        return manifest_sha256
    return f"{manifest_sha256}-{hashlib.sha256(json.dumps(sorted(only)).encode()).hexdigest()[:12]}"


def _cached(into: Path, manifest_sha256: str, only: Sequence[str] | None) -> Path | None:
    """The copy that is there already, the whole directory preferred over the part."""
    paths = [into / _cache_name(manifest_sha256, None), into / _cache_name(manifest_sha256, only)]
    return next((path for path in paths if path.is_dir()), None)


def _entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(sha256=digest, size=file.tell())


def _pull(store: ObjectStore, key: str, entry: FileEntry, path: Path) -> None:
    """One file, large ones in ranges; verified as it arrives."""
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("xb") as file:
            for start in range(0, max(entry.size, 1), PART_BYTES):
                whole = entry.size <= PART_BYTES
                part = store.get(key) if whole else store.get_range(key, start, min(PART_BYTES, entry.size - start))
                digest.update(part)
                size += file.write(part)
    except NotFound as error:
        raise Corrupt(key, "missing, though the manifest names it") from error
    if size != entry.size or digest.hexdigest() != entry.sha256:
        raise Corrupt(
            key,
            f"{size} bytes of sha256 {digest.hexdigest()}, but the manifest says {entry.size} of {entry.sha256}",
        )


def _parallel(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Results in order; the first error ends it, without starting what has not begun."""
    with ThreadPoolExecutor(WORKERS) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
