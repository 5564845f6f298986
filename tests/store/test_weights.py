"""The weight store: one contract for S3 and Mooncake, and how the fast shelf falls back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.services.endpoints import S3Endpoint
from infra.store.directories import Shelf, Upload, copy_directory, pull_directory, push_directory, read_manifest
from infra.store.errors import Corrupt, NotFound, StoreUnavailable
from infra.store.mooncake import MooncakeShelf, MooncakeUnavailable
from infra.store.objects import ObjectStore
from infra.store.weights import WeightStore
from rl.config.infrastructure import MooncakeWeights
from tests.store import servers

ROOT = Path(__file__).parents[2]
serial = count()


class MemoryShelf:
    """Files in a dictionary, in parts, as Mooncake keeps them."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], bytes] = {}

    def put(self, key: str, body: bytes) -> None:
        if body:
            self.values[key, 0] = body

    def get(self, key: str) -> bytes:
        return self.get_range(key, 0, 0)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if (key, start) not in self.values:
            raise NotFound("memory", key)
        return self.values[key, start]

    def forget(self, key_prefix: str) -> None:
        self.values = {key: body for key, body in self.values.items() if not key[0].startswith(key_prefix)}

    def close(self) -> None: ...

    def upload(self, key: str, part_bytes: int) -> Upload:
        shelf = self

        class Sending:
            def send(self, start: int, body: bytes) -> None:
                shelf.values[key, start] = body

            def finish(self) -> None: ...

            def abandon(self) -> None: ...

        return Sending()


@pytest.fixture(scope="session")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with servers.mooncake_master(tmp_path_factory.mktemp("mooncake")) as address:
        yield address


@pytest.fixture(scope="session")
def mooncake(master: str) -> Iterator[MooncakeShelf]:
    shelf = MooncakeShelf(MooncakeWeights(master=master), lend_bytes=128 << 20)
    yield shelf
    shelf.close()


@pytest.fixture(autouse=True)
def room(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test leaves in Mooncake makes room."""
    yield
    if "mooncake" in request.fixturenames or "[mooncake" in request.node.name:
        request.getfixturevalue("mooncake").forget("test/")


@pytest.fixture
def weed(s3: S3Endpoint) -> ObjectStore:
    return ObjectStore(s3.client(), s3.bucket)


@pytest.fixture(params=["memory", *(pytest.param(kind, marks=pytest.mark.server) for kind in ("weed", "mooncake"))])
def shelf(request: pytest.FixtureRequest) -> Shelf:
    return MemoryShelf() if request.param == "memory" else request.getfixturevalue(request.param)


@pytest.fixture
def at() -> str:
    """A key prefix that is used once."""
    return f"test/weights-{os.getpid()}-{next(serial)}/"


LEAST = 5 << 20
"""The smallest part that S3 takes, but for the last one of a file."""


def write(directory: Path, sizes: dict[str, int]) -> Path:
    for i, (name, size) in enumerate(sizes.items()):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((bytes([i]) + name.encode()) * (size // (1 + len(name))) + b"z" * (size % (1 + len(name))))
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture
def version(tmp_path: Path) -> Path:
    sizes = {"model/none": 0, "model/small": 7, "model/even": LEAST, "model/two": 2 * LEAST, "trainer/over": LEAST + 1}
    return write(tmp_path / "version", sizes)


def model(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: body for name, body in files.items() if name.startswith("model/")}


def test_a_version_comes_back_as_it_was(shelf: Shelf, at: str, version: Path, tmp_path: Path) -> None:
    sha = push_directory(shelf, at, version, LEAST)
    assert push_directory(shelf, at, version, LEAST) == sha
    assert contents(pull_directory(shelf, at, sha, tmp_path / "a")) == contents(version)
    part = pull_directory(shelf, at, sha, tmp_path / "b", only=("model/*",))
    assert contents(part) == model(contents(version))


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 41), min_size=1), st.integers(1, 20))
@settings(deadline=None, max_examples=60)
def test_any_sizes_come_back(
    tmp_path_factory: pytest.TempPathFactory, sizes: dict[str, int], part_bytes: int
) -> None:
    work, shelf = tmp_path_factory.mktemp("any"), MemoryShelf()
    write(work / "in", sizes)
    sha = push_directory(shelf, "x/", work / "in", part_bytes)
    assert contents(pull_directory(shelf, "x/", sha, work / "out")) == contents(work / "in")
    assert max(map(len, (body for (key, _), body in shelf.values.items() if "manifest" not in key)), default=0) <= (
        part_bytes
    )


class Cut:
    """A shelf whose wire is cut after so many operations."""

    def __init__(self, shelf: Shelf, operations: int) -> None:
        self._shelf, self._left = shelf, operations

    def _spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise StoreUnavailable("cut")

    def put(self, key: str, body: bytes) -> None:
        self._spend()
        self._shelf.put(key, body)

    def upload(self, key: str, part_bytes: int) -> Upload:
        self._spend()
        return CutUpload(self, self._shelf.upload(key, part_bytes))


class CutUpload:
    def __init__(self, cut: Cut, upload: Upload) -> None:
        self._cut, self._upload = cut, upload

    def send(self, start: int, body: bytes) -> None:
        self._cut._spend()
        self._upload.send(start, body)

    def finish(self) -> None:
        self._cut._spend()
        self._upload.finish()

    def abandon(self) -> None:
        self._upload.abandon()


def test_a_version_is_there_whole_or_not_at_all(shelf: Shelf, version: Path, tmp_path: Path) -> None:
    """The push is cut off before each of its 12 operations."""
    for operations in range(12):
        at = f"test/cut-{os.getpid()}-{next(serial)}/"
        with pytest.raises(StoreUnavailable):
            push_directory(cast(Shelf, Cut(shelf, operations)), at, version, LEAST)
        with pytest.raises(NotFound, match=r"manifest\.json"):
            pull_directory(shelf, at, None, tmp_path / "cache")
        if isinstance(shelf, MooncakeShelf):
            shelf.forget(at)  # what broke off takes room
    at = f"test/cut-{os.getpid()}-{next(serial)}/"
    sha = push_directory(cast(Shelf, Cut(shelf, 12)), at, version, LEAST)
    assert contents(pull_directory(shelf, at, sha, tmp_path / "cache")) == contents(version)


class Bent:
    """A shelf that answers reads of one part with a flipped bit, or with nothing."""

    def __init__(self, shelf: Shelf, key: str, start: int, gone: bool) -> None:
        self._shelf, self._target, self._gone = shelf, (key, start), gone

    def get(self, key: str) -> bytes:
        return self._bend(key, 0, self._shelf.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._bend(key, start, self._shelf.get_range(key, start, length))

    def _bend(self, key: str, start: int, body: bytes) -> bytes:
        if (key, start) != self._target:
            return body
        if self._gone:
            raise NotFound("bent", key)
        return body[:-1] + bytes([body[-1] ^ 1])


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize(("name", "start"), [("model/small", 0), ("model/two", LEAST), ("trainer/over", LEAST)])
def test_a_damaged_part_is_named_and_leaves_nothing(
    shelf: Shelf, at: str, version: Path, tmp_path: Path, name: str, start: int, gone: bool
) -> None:
    sha = push_directory(shelf, at, version, LEAST)
    told = "missing" if gone else f"at byte {start}: "
    with pytest.raises(Corrupt, match=rf"{name}: {told}"):
        pull_directory(cast(Shelf, Bent(shelf, at + name, start, gone)), at, sha, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


# -- a fast shelf beside S3 ------------------------------------------------------------------------------


def test_engines_read_the_fast_shelf_and_a_resume_reads_s3(at: str, version: Path, tmp_path: Path) -> None:
    truth, fast = MemoryShelf(), MemoryShelf()
    weights = WeightStore(truth, fast)
    sha = weights.push(at, version)
    assert {key for key, _ in fast.values} == {at + name for name in model(contents(version)) if "none" not in name} | {
        at + "manifest.json"
    }
    assert contents(pull_directory(truth, at, sha, tmp_path / "resume")) == contents(version)
    truth.values.clear()
    assert contents(weights.pull(at, sha, tmp_path / "cache")) == model(contents(version))


@pytest.mark.parametrize("lost", ["all", "manifest.json", "model/two", "damage"])
def test_what_is_not_on_the_fast_shelf_is_read_from_s3_by_name(
    at: str, version: Path, tmp_path: Path, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    fast = MemoryShelf()
    weights = WeightStore(MemoryShelf(), fast)
    sha = weights.push(at, version)
    for key, start in list(fast.values):
        if lost == "damage":
            fast.values[key, start] += b"x"
        elif lost == "all" or lost in key:
            del fast.values[key, start]
    assert contents(weights.pull(at, sha, tmp_path / "cache")) == model(contents(version))
    assert f"{at} is read from S3: {at}" in caplog.text or f"{at} is read from S3: s3://memory/{at}" in caplog.text


def test_a_copy_of_files_that_changed_is_refused(at: str, version: Path) -> None:
    truth, fast = MemoryShelf(), MemoryShelf()
    sha = push_directory(truth, at, version)
    _, manifest = read_manifest(truth, at, sha)
    (version / "model/small").write_bytes(b"changed")
    with pytest.raises(Corrupt, match="changed since it was pushed"):
        copy_directory(fast, at, manifest, version)
    assert (at + "manifest.json", 0) not in fast.values


def test_a_master_that_is_away_is_told_at_once() -> None:
    with pytest.raises(MooncakeUnavailable, match=r"master 127.0.0.1:9 can not be reached.*start mooncake_master"):
        MooncakeShelf(MooncakeWeights(master="127.0.0.1:9"))


@pytest.mark.server
def test_the_newest_two_versions_are_in_mooncake_and_older_ones_make_room(
    mooncake: MooncakeShelf, version: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten versions of 15 MiB (`model/`), in memory for eight."""
    weights, ats, shas = WeightStore(MemoryShelf(), mooncake), [], []
    for i in range(10):
        ats.append(f"test/room-{os.getpid()}-{next(serial)}/")
        shas.append(weights.push(ats[-1], version))
        for at, sha in list(zip(ats, shas, strict=True))[-2:]:
            copy = pull_directory(mooncake, at, sha, tmp_path / f"{i}" / at, only=("model/*",))
            assert contents(copy) == model(contents(version))
    with pytest.raises(NotFound):
        mooncake.get(ats[-3] + "manifest.json")
    assert not caplog.records


@pytest.mark.server
def test_a_version_without_room_is_told_and_leaves_the_others(
    mooncake: MooncakeShelf, at: str, version: Path, tmp_path: Path
) -> None:
    sha = push_directory(mooncake, at, version, LEAST)
    (huge := tmp_path / "huge").mkdir()
    (huge / "big").write_bytes(bytes(112 << 20))
    with pytest.raises(MooncakeUnavailable, match=r"no room, raise weights.lend_mb"):
        push_directory(mooncake, at + "huge/", huge, LEAST)
    mooncake.forget(at + "huge/")
    assert contents(pull_directory(mooncake, at, sha, tmp_path / "cache")) == contents(version)


LISTENER = """
import json
import sys
import psutil
from infra.store.mooncake import MooncakeShelf
from rl.config.infrastructure import MooncakeWeights
shelf = MooncakeShelf(MooncakeWeights(master=sys.argv[1]))
print(json.dumps([c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]))
shelf.close()
"""


@pytest.mark.server
def test_that_the_library_listens_everywhere_is_told_and_still_true(master: str) -> None:
    """Whatever it is told; should it learn to obey, the address is to be given, and the warning to go."""
    environment = os.environ | {"MC_TCP_BIND_ADDRESS": "127.0.0.1"}
    command = [sys.executable, "-c", LISTENER, master]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert master.startswith("127.0.0.1:") and set(json.loads(done.stdout)) & {"0.0.0.0", "::"}
    assert "listens on every interface of its machine, without authentication" in done.stderr


LENDER = """
import sys
from pathlib import Path
from infra.store.directories import push_directory
from infra.store.mooncake import MooncakeShelf
from rl.config.infrastructure import MooncakeWeights
shelf = MooncakeShelf(MooncakeWeights(master=sys.argv[1]), lend_bytes=64 << 20)
print(push_directory(shelf, sys.argv[2], Path(sys.argv[3])), flush=True)
sys.stdin.read()
"""


@pytest.mark.server
def test_a_version_goes_with_the_process_that_lent_its_memory(
    tmp_path_factory: pytest.TempPathFactory, weed: ObjectStore, at: str, version: Path, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The trainer is another process; it is killed, and then the master."""
    with servers.mooncake_master(tmp_path_factory.mktemp("mooncake")) as address:
        fast = MooncakeShelf(MooncakeWeights(master=address))
        caplog.clear()
        weights = WeightStore(weed, fast)
        command = [sys.executable, "-c", LENDER, address, at, str(version)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as lender:
            try:
                assert lender.stdout is not None
                sha = lender.stdout.readline().strip()
                assert contents(weights.pull(at, sha, tmp_path / "a")) == model(contents(version))
                assert push_directory(weed, at, version) == sha
            finally:
                lender.kill()
        assert not caplog.records
        assert contents(weights.pull(at, sha, tmp_path / "b")) == model(contents(version))
        assert "is read from S3" in caplog.text
    caplog.clear()
    after = at.replace("weights", "after")
    assert contents(weights.pull(after, weights.push(after, version), tmp_path / "c")) == model(contents(version))
    assert "is in S3 only" in caplog.text and "is read from S3" in caplog.text
    fast.close()
