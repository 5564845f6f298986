"""Directories of files in the store: weights, adapters, optimizer state, the base model.

A directory is its files under one key prefix and a manifest of them, written last. Its name is the sha256 of that
manifest. Where the files lie is a `Shelf`: S3, or memory (Mooncake).

Invariants
- A directory exists exactly when its manifest does: an upload that broke off is never seen.
- What is pulled was verified: every part by length and sha256, the manifest by its own sha256 where it is given.
- Parts are sent and fetched side by side, whichever file they are of, each hashed once, by the thread that moves it;
  `WORKERS` parts are in memory at most, never a file.
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
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Protocol, TypeVar

from pydantic import ValidationError

from infra.store.errors import Corrupt, NotFound, StoreError
from infra.store.manifest import MANIFEST, FileEntry, Manifest, Part, spans

T = TypeVar("T")
R = TypeVar("R")

WORKERS = 8
PART_BYTES = 16 << 20
"""S3 wants 5 MiB at least, and 10,000 parts of a file at most. 8, 16 and 64 MiB were equally fast on two cores."""


class Upload(Protocol):
    """One file on its way. Not there before `finish`."""

    def send(self, start: int, body: bytes) -> None:
        """The part at this offset; from any thread, in any order."""

    def finish(self) -> None:
        """All parts were sent: the file is there."""

    def abandon(self) -> None:
        """Give back the room of what was sent; after a failure, instead of `finish`."""


class Shelf(Protocol):
    """Where files lie, under keys that are written once. Safe to share between threads. All raise StoreErrors."""

    def put(self, key: str, body: bytes) -> None:
        """A small file. An empty one need not leave anything: it is never read."""

    def upload(self, key: str, part_bytes: int) -> Upload:
        """Begin a file of several parts, all but the last of `part_bytes`."""

    def get(self, key: str) -> bytes:
        """What was `put`. Raises NotFound."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly one part of what was uploaded; shorter where the file ends early. Raises NotFound."""


def push_directory(store: Shelf, key_prefix: str, directory: Path, part_bytes: int = PART_BYTES) -> str:
    """Upload all files below `directory` (links are followed) and then the manifest; returns its sha256.

    `key_prefix` ends with a slash and is used once: `state/{lsn}-{nonce}/`, `base/`. Repeating a push of the
    same files is harmless. Raises ValueError when there is nothing to push, or a file is named manifest.json.
    """
    names = sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    if not names or MANIFEST in names:
        raise ValueError(
            f"{directory}: can not be pushed: " + (f"{MANIFEST} is a reserved name" if names else "no file")
        )
    manifest = Manifest(part_bytes=part_bytes, files=_send(store, key_prefix, directory, names, part_bytes))
    body = manifest.body()
    store.put(key_prefix + MANIFEST, body)
    return hashlib.sha256(body).hexdigest()


def copy_directory(
    shelf: Shelf, key_prefix: str, manifest: Manifest, directory: Path, only: Sequence[str] | None = None
) -> None:
    """Put files of a directory that was pushed from here on another shelf as well, then the same manifest: it names
    what is not there, too, so pull no more than `only` from there. Raises Corrupt when they changed meanwhile."""
    names = _wanted(manifest, only, key_prefix)
    files = _send(shelf, key_prefix, directory, names, manifest.part_bytes)
    for name in names:
        if files[name] != manifest.files[name]:
            raise Corrupt(str(directory / name), "changed since it was pushed")
    shelf.put(key_prefix + MANIFEST, manifest.body())


def _send(
    store: Shelf, key_prefix: str, directory: Path, names: Sequence[str], part_bytes: int
) -> dict[str, FileEntry]:
    """Send the files, all parts side by side; what each file is."""
    sizes = {name: (directory / name).stat().st_size for name in names}
    large = [name for name in names if sizes[name] > part_bytes]
    uploads: dict[str, Upload] = {}

    def begin(name: str) -> None:
        uploads[name] = store.upload(key_prefix + name, part_bytes)

    def move(piece: tuple[str, int, int]) -> str:
        name, start, length = piece
        body = _read(directory / name, start, length)
        if name in uploads:
            uploads[name].send(start, body)
        else:
            store.put(key_prefix + name, body)
        return hashlib.sha256(body).hexdigest()

    pieces = [(name, start, length) for name in names for start, length in spans(sizes[name], part_bytes)]
    try:
        _parallel(begin, large)
        digests = _parallel(move, pieces)
        _parallel(lambda name: uploads[name].finish(), large)
    except BaseException:
        for upload in uploads.values():
            with suppress(StoreError):
                upload.abandon()
        raise
    parts: dict[str, list[str]] = {name: [] for name in names}
    for (name, _, _), digest in zip(pieces, digests, strict=True):
        parts[name].append(digest)
    return {name: FileEntry(size=sizes[name], parts=tuple(parts[name])) for name in names}


def _read(path: Path, start: int, length: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        body = os.pread(file.fileno(), length, start)
    if len(body) != length:
        raise Corrupt(str(path), f"{len(body)} bytes at {start} instead of {length}: it changed while it was pushed")
    return body


def read_manifest(store: Shelf, key_prefix: str, manifest_sha256: str | None = None) -> tuple[str, Manifest]:
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
    store: Shelf,
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
    names = _wanted(manifest, only, key_prefix)
    final = into / _cache_name(manifest_sha256, only)
    into.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".pulling-", dir=into))
    try:
        for name in names:
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            with (draft / name).open("xb") as file:
                file.truncate(manifest.files[name].size)
        parts = [(name, part) for name in names for part in manifest.parts(name)]
        _parallel(lambda item: _fetch(store, key_prefix + item[0], manifest, item[1], draft / item[0]), parts)
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


def _wanted(manifest: Manifest, only: Sequence[str] | None, where: str) -> list[str]:
    names = [n for n in manifest.files if only is None or any(fnmatchcase(n, pattern) for pattern in only)]
    if not names:
        raise ValueError(f"{where}: no file matches {only}; there are {', '.join(sorted(manifest.files))}")
    return names


def fetch_part(store: Shelf, key: str, part: Part, whole: bool) -> bytes:
    """One part, verified; `whole`: it is all of its file. Raises Corrupt."""
    if part.length == 0:
        return b""
    try:
        body = store.get(key) if whole else store.get_range(key, part.start, part.length)
    except NotFound as error:
        raise Corrupt(key, "missing, though the manifest names it") from error
    found = hashlib.sha256(body).hexdigest()
    if len(body) != part.length or found != part.sha256:
        raise Corrupt(
            key,
            f"at byte {part.start}: {len(body)} bytes of sha256 {found}, "
            f"but the manifest says {part.length} of {part.sha256}",
        )
    return body


def _fetch(store: Shelf, key: str, manifest: Manifest, part: Part, path: Path) -> None:
    """One part to its place."""
    body = fetch_part(store, key, part, whole=path.stat().st_size <= manifest.part_bytes)
    with path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), body, part.start)


def _parallel(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Results in order; the first error ends it, without starting what has not begun."""
    with ThreadPoolExecutor(WORKERS) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
