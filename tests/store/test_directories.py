"""Directories in the store: whole or not there, verified, cached."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from botocore.exceptions import ReadTimeoutError

from infra.store.directories import pull_directory, push_directory, read_manifest
from infra.store.errors import Corrupt, NotFound, StoreUnavailable
from infra.store.objects import ObjectStore
from tests.store.conftest import Tap

FILES = {
    "model/config.json": b"{}",
    "model/weights.bin": bytes(range(256)) * 40,
    "trainer/state.json": b"[1]",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, body in FILES.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return tmp_path / "source"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def contents(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_a_directory_comes_back_as_it_was(
    tapped: ObjectStore, tap: Tap, prefix: str, source: Path, cache: Path
) -> None:
    sha = push_directory(tapped, prefix, source)
    assert push_directory(tapped, prefix, source) == sha, "the name depends on the content alone"
    copy = pull_directory(tapped, prefix, sha, cache)
    assert contents(copy) == FILES and copy.parent == cache
    assert [p.name for p in cache.iterdir()] == [copy.name], "nothing else is left"
    before = len(tap.calls)
    assert pull_directory(tapped, prefix, sha, cache) == copy
    assert len(tap.calls) == before, "cached: nothing is asked"
    assert pull_directory(tapped, prefix, None, cache) == copy
    assert pull_directory(tapped, prefix, sha, cache, only=["model/*"]) == copy


def test_a_part_is_pulled_alone(tapped: ObjectStore, tap: Tap, prefix: str, source: Path, cache: Path) -> None:
    sha = push_directory(tapped, prefix, source)
    part = pull_directory(tapped, prefix, sha, cache, only=("*.json",))
    assert set(contents(part)) == {"model/config.json", "trainer/state.json"}
    assert tap.count("get_object", "weights.bin") == 0
    with pytest.raises(ValueError, match="no file matches"):
        pull_directory(tapped, prefix, sha, cache, only=["nothing*"])
    assert pull_directory(tapped, prefix, sha, cache) != part


def test_the_manifest_is_written_last(tapped: ObjectStore, tap: Tap, prefix: str, source: Path) -> None:
    push_directory(tapped, prefix, source)
    written = [key for name, key in tap.calls if name == "put_object"]
    assert written[-1] == prefix + "manifest.json" and len(written) == len(FILES) + 1


def test_a_broken_upload_is_never_seen(tap: Tap, store: ObjectStore, prefix: str, source: Path, cache: Path) -> None:
    hurried = ObjectStore(tap, store.bucket, deadline_s=0.1)
    tap.before["put_object"] = [lambda: None, *[ReadTimeoutError(endpoint_url="http://store")] * 99]
    with pytest.raises(StoreUnavailable):
        push_directory(hurried, prefix, source)
    with pytest.raises(NotFound, match=r"manifest\.json"):
        pull_directory(store, prefix, None, cache)
    tap.before.clear()
    assert contents(pull_directory(store, prefix, push_directory(store, prefix, source), cache)) == FILES


@pytest.mark.parametrize("damage", [b"", bytes(10240), None])
def test_damage_is_named_and_leaves_nothing(
    store: ObjectStore, prefix: str, source: Path, cache: Path, damage: bytes | None
) -> None:
    sha = push_directory(store, prefix, source)
    key = prefix + "model/weights.bin"
    if damage is None:
        store.delete([key])
    else:
        store.put(key, damage)
    with pytest.raises(Corrupt, match=r"model/weights\.bin"):
        pull_directory(store, prefix, sha, cache)
    assert list(cache.iterdir()) == []


def test_another_manifest_is_not_taken_for_the_named_one(
    store: ObjectStore, prefix: str, source: Path, cache: Path
) -> None:
    sha = push_directory(store, prefix, source)
    (source / "model/config.json").write_bytes(b'{"x": 1}')
    push_directory(store, prefix, source)
    with pytest.raises(Corrupt, match=f"but {sha} is named"):
        pull_directory(store, prefix, sha, cache)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a//b", "./a", ".", "", "a\\..\\b", "a\0b"])
def test_a_manifest_can_not_point_outside(store: ObjectStore, prefix: str, cache: Path, name: str) -> None:
    manifest = {"part_bytes": 1, "files": {name: {"parts": ["0" * 64], "size": 0}}}
    store.put(prefix + "manifest.json", json.dumps(manifest).encode())
    with pytest.raises(Corrupt, match="unsafe file name"):
        pull_directory(store, prefix, None, cache)


def manifest_of(size: int, parts: list[str]) -> bytes:
    return json.dumps({"part_bytes": 10, "files": {"a": {"size": size, "parts": parts}}}).encode()


@pytest.mark.parametrize(
    "body", [b"", b"[]", manifest_of(1, ["x"]), manifest_of(1, []), manifest_of(11, ["0" * 64]), manifest_of(-1, [])]
)
def test_what_is_no_manifest_is_refused(store: ObjectStore, prefix: str, body: bytes) -> None:
    store.put(prefix + "manifest.json", body)
    with pytest.raises(Corrupt, match="not a manifest"):
        read_manifest(store, prefix)


LEAST = 5 << 20
"""The smallest part that S3 takes, but for the last one of a file."""


def test_large_files_travel_in_parts(
    tapped: ObjectStore, tap: Tap, prefix: str, tmp_path: Path, cache: Path
) -> None:
    (tmp_path / "s").mkdir()
    sizes = {"under": LEAST - 1, "even": LEAST, "over": LEAST + 1, "two": 2 * LEAST, "none": 0}
    for i, (name, size) in enumerate(sizes.items()):
        (tmp_path / "s" / name).write_bytes(bytes([i, 255, 7]) * (size // 3) + b"x" * (size % 3))
    sha = push_directory(tapped, prefix, tmp_path / "s", part_bytes=LEAST)
    assert contents(pull_directory(tapped, prefix, sha, cache)) == contents(tmp_path / "s")
    assert tap.count("upload_part") == 4 and tap.count("get_object", prefix + "two") == 2
    assert {name: tapped.get(prefix + name) for name in sizes} == contents(tmp_path / "s"), "as any S3 client sees it"


def test_a_broken_part_abandons_its_file(tap: Tap, store: ObjectStore, prefix: str, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "big").write_bytes(bytes(2 * LEAST))
    hurried = ObjectStore(tap, store.bucket, deadline_s=0.1)
    tap.before["upload_part"] = [lambda: None, *[ReadTimeoutError(endpoint_url="http://store")] * 99]
    with pytest.raises(StoreUnavailable):
        push_directory(hurried, prefix, tmp_path / "s", part_bytes=LEAST)
    assert list(store.keys(prefix)) == [] and tap.count("abort_multipart_upload") == 1


@pytest.mark.parametrize("size", [LEAST, 2 * LEAST - 1, 3 * LEAST])
def test_a_large_file_of_another_length_is_named(
    store: ObjectStore, prefix: str, tmp_path: Path, cache: Path, size: int
) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "big").write_bytes(bytes(2 * LEAST))
    sha = push_directory(store, prefix, tmp_path / "s", part_bytes=LEAST)
    store.put(prefix + "big", bytes(size))
    if size > 2 * LEAST:  # what the manifest names is there
        assert (pull_directory(store, prefix, sha, cache) / "big").stat().st_size == 2 * LEAST
    else:
        with pytest.raises(Corrupt, match=rf"big: at byte {LEAST}: {size - LEAST} bytes"):
            pull_directory(store, prefix, sha, cache)
        assert list(cache.iterdir()) == []


def test_racing_pulls_end_in_one_copy(store: ObjectStore, prefix: str, source: Path, cache: Path) -> None:
    sha = push_directory(store, prefix, source)
    with ThreadPoolExecutor(4) as pool:
        copies = set(pool.map(lambda _: pull_directory(store, prefix, sha, cache), range(4)))
    assert len(copies) == 1 and [contents(copy) for copy in copies] == [FILES]
    assert len(list(cache.iterdir())) == 1


def test_what_can_not_be_pushed_is_refused(store: ObjectStore, prefix: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file"):
        push_directory(store, prefix, tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="reserved"):
        push_directory(store, prefix, tmp_path)
