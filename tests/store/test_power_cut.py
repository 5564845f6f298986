"""What the embedded server acknowledged outlives a power cut, with writers at work when it happens."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from infra.services import supervisor
from infra.services.endpoints import S3Endpoint
from tests.store.disks import Disk

WRITERS = 4


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "disk", megabytes=400)
    try:
        yield made
    finally:
        supervisor.down(made.at / "home")
        made.close()


def _write_until_it_dies(s3: S3Endpoint, writer: str, enough: threading.Barrier) -> dict[str, bytes]:
    """Objects of 40 bytes and of 200 KB in turn; those that were acknowledged."""
    client, acknowledged = s3.client(attempts=1, read_timeout=5.0), {}
    for n in range(10_000):
        key, body = f"cut/{writer}/{n:05d}", os.urandom(40 if n % 2 else 200_000)
        try:
            client.put_object(Bucket=s3.bucket, Key=key, Body=body, IfNoneMatch="*", Metadata={"nonce": key})
        except (BotoCoreError, ClientError):
            break
        acknowledged[key] = body
        if n == 40:
            enough.wait(timeout=60)
    return acknowledged


@pytest.mark.server
@pytest.mark.slow
def test_a_power_cut_loses_nothing_acknowledged(disk: Disk) -> None:
    home = disk.at / "home"
    s3 = supervisor.up(home, supervisor.AUTO, ["s3"]).need_s3()
    os.sync()  # the server's own first files
    acknowledged: dict[str, bytes] = {}
    for life in range(2):
        enough = threading.Barrier(WRITERS + 1)
        with ThreadPoolExecutor(WRITERS) as pool:
            writers = [pool.submit(_write_until_it_dies, s3, f"{life}-{n}", enough) for n in range(WRITERS)]
            enough.wait(timeout=60)
            (pid,) = [s.pid for s in supervisor.status(home) if s.name == "s3" and s.pid]
            os.kill(pid, signal.SIGKILL)
            for writer in writers:
                acknowledged |= writer.result(timeout=60)
        supervisor.down(home)
        disk.cut_power()
        (home / "s3" / "boot").write_text("the life before")
        (home / "s3" / "rollmill_99.dat").touch()  # a volume begun at that very moment
        s3 = supervisor.up(home, supervisor.AUTO, ["s3"]).need_s3()
        client = s3.client()
        for key, body in acknowledged.items():
            got = client.get_object(Bucket=s3.bucket, Key=key)
            assert got["Body"].read() == body, key
            assert got["Metadata"] == {"nonce": key}
