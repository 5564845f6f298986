"""What the embedded server acknowledged outlives its SIGKILL, and clients outlive its absence."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from infra.services import supervisor
from infra.store.buffer import SampleBuffer
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection
from rl.staleness import StalenessPolicy
from rl.trajectory import Uid
from tests.store.samples import commit, group, same

POLICY = StalenessPolicy(alpha=1, groups_per_step=1, examined_per_step=1)


@pytest.mark.server
@pytest.mark.slow
def test_a_killed_server_loses_nothing_and_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s3 = supervisor.up(tmp_path, supervisor.AUTO, ["s3"]).need_s3()
    try:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
        store = ObjectStore.connect(StoreSection(endpoint_url=s3.endpoint_url))
        log, buffer = CommitLog(store, "t/r/", "trainer-1"), SampleBuffer(store, "t/r/")
        log.fence()
        commit(log)
        for n in range(20):
            buffer.seal([group(n)], "w1", n)
        (pid,) = [s.pid for s in supervisor.status(tmp_path) if s.name == "s3" and s.pid]
        os.kill(pid, signal.SIGKILL)
        again = threading.Thread(target=supervisor.up, args=(tmp_path, supervisor.Ports(), ["s3"]))
        again.start()
        commit(log, [Uid(0, 0)])  # meets no server at first, then a starting one
        again.join()
        reader = CommitLog(store, "t/r/", "reader")
        assert same(reader.sync(), log.ledger)
        assert [c.uid for c in SampleBuffer(store, "t/r/").refresh(reader.ledger, POLICY)] == [
            Uid(n, 0) for n in range(1, 20)
        ]
    finally:
        supervisor.down(tmp_path)
