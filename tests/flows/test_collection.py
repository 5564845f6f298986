"""A run that collects its garbage as eagerly as can be goes on after a kill, replays, and leaves what it must."""

from __future__ import annotations

import os
import signal

import pytest

from infra.store.audit import audit
from infra.store.gc import Collector
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from tests.command_line import Rollmill
from tests.flows.test_runs import find, head, wait_until

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.full]


def test_a_killed_trainer_replays_from_a_sparse_checkpoint_after_collections(rollmill: Rollmill):
    name = "collect"
    process = rollmill.start(
        *rollmill.train_arguments(
            name,
            "training.steps=9",
            "training.checkpoint_every=4",
            "retention={newest: 1, grace: 0, collect_every: 1}",
        )
    )
    try:
        wait_until(lambda: rollmill_floor(rollmill, name) >= 3 and head(rollmill, name) >= 6, "a collection", 200)
        trainer = find(process, "infra.training.main")
        assert trainer is not None
        os.kill(trainer.pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, output

    config = rollmill.config(name)
    store = ObjectStore.connect(config.store)
    found = audit(store, config.prefix)
    assert not found.findings and found.account.head == 9
    Collector(CommitLog(store, config.prefix, "test"), config.prefix, config.keeps, 0.0).collect()
    states = {key.split("/")[3] for key in store.keys(f"{config.prefix}state/")}
    assert len(states) == 2, "the head, and the version before, whose samples may be trained still"


def rollmill_floor(rollmill: Rollmill, name: str) -> int:
    return rollmill.log(name).ledger.gc_floor if head(rollmill, name) >= 0 else -1
