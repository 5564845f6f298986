"""The server's disk is full: writes fail by name, nothing acknowledged is lost, and with space all goes on."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.services import supervisor
from infra.services.errors import DiskFull
from infra.store.buffer import SampleBuffer
from infra.store.errors import StoreFull
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection
from rl.staleness import StalenessPolicy
from rl.trajectory import Uid
from tests.store.conftest import CREDENTIALS
from tests.store.disks import memory_disk
from tests.store.samples import commit, group, same

pytestmark = [pytest.mark.server, pytest.mark.slow]

POLICY = StalenessPolicy(alpha=100, groups_per_step=1, examined_per_step=1)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with memory_disk(tmp_path / "disk", megabytes=60) as disk:
        try:
            yield disk / "home"
        finally:
            (disk / "filler").unlink(missing_ok=True)
            supervisor.down(disk / "home")


@pytest.fixture
def store(home: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    s3 = supervisor.up(home, supervisor.AUTO, ["s3"]).need_s3()
    for name, value in zip(CREDENTIALS, (s3.access_key, s3.secret_key), strict=True):
        monkeypatch.setenv(name, value)
    connected = ObjectStore.connect(StoreSection(endpoint_url=s3.endpoint_url))
    return ObjectStore(connected.client, connected.bucket, deadline_s=1.0)


def fill(home: Path) -> Path:
    """A file that takes what is left of the disk."""
    filler = home.parent / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            while True:
                try:
                    file.write(bytes(size))
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    break
    return filler


def test_a_full_server_is_named_loses_nothing_and_goes_on(home: Path, store: ObjectStore) -> None:
    log, buffer = CommitLog(store, "t/r/", "trainer-1"), SampleBuffer(store, "t/r/")
    log.fence()
    commit(log)
    for n in range(10):
        buffer.seal([group(n)], "w1", n)
        commit(log, [Uid(n, 0)] if n % 2 else [], segments=[f"groups/0000000000/w1-{n:06d}.parquet"] if n % 2 else [])
    filler = fill(home)

    for write in (lambda: buffer.seal([group(10)], "w1", 10), lambda: commit(log, [Uid(0, 0)])):
        with pytest.raises(StoreFull, match=r"give the server more space") as raised:
            write()
        assert "\n" not in str(raised.value) and store.client.meta.endpoint_url in str(raised.value)
    reader = CommitLog(store, "t/r/", "reader")
    assert same(reader.sync(), log.ledger), "what was acknowledged is still read"

    filler.unlink()
    buffer.seal([group(10)], "w1", 10)
    log.fence()  # a server that is full may have written the step before it failed
    commit(log, [Uid(0, 0)], segments=["groups/0000000000/w1-000000.parquet"])

    supervisor.down(home)
    supervisor.up(home, None, ["s3"])
    reader = CommitLog(store, "t/r/", "reader")
    assert same(reader.sync(), log.ledger)
    again = SampleBuffer(store, "t/r/")
    assert [c.uid for c in again.refresh(reader.ledger, POLICY)] == [Uid(n, 0) for n in (2, 4, 6, 8, 10)]
    assert [g.uid for record in reader.steps_after(1) for g in again.fetch(record)] == [
        *(Uid(n, 0) for n in (1, 3, 5, 7, 9)),
        Uid(0, 0),
    ]


def test_services_end_on_a_full_disk_and_are_not_started_there(home: Path, store: ObjectStore) -> None:
    store.put("kept", b"x" * 1000)
    filler = fill(home)
    assert supervisor.down(home) == ["s3"]
    with pytest.raises(DiskFull, match="free some space"):
        supervisor.up(home, None, ["s3"])
    filler.unlink()
    supervisor.up(home, None, ["s3"])
    assert store.get("kept") == b"x" * 1000
