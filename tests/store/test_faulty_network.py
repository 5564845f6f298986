"""A network that fails 5 % of all requests, in every way: nothing is lost or doubled, and the work is finished."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from time import monotonic, sleep

import pytest

from benchmarks.crash.standin import Rollout, Trainer, Witness, restore
from infra.services.endpoints import S3Endpoint
from infra.store import clients
from infra.store.audit import audit
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection
from rl.selection import DropPolicy
from rl.staleness import StalenessPolicy
from tests.store.conftest import CREDENTIALS
from tests.store.fault_proxy import Fault, FaultProxy, bad_network

SHARE = 0.05
PRODUCERS, STEPS = 4, 25
POLICY = StalenessPolicy(alpha=2, groups_per_step=4, examined_per_step=4)
DROPS = DropPolicy()
PAUSE_S = 0.02


@pytest.fixture
def proxy(s3: S3Endpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    for name, value in zip(CREDENTIALS, (s3.access_key, s3.secret_key), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(clients, "READ_TIMEOUT_S", 1.0)
    with bad_network(s3.endpoint_url, SHARE, seed=0, silence_s=3.0) as running:
        yield running


class Run:
    """Producers, a trainer and a reader in threads, each with the log of its own, until the trainer is done."""

    def __init__(self, section: StoreSection, prefix: str, work: Path):
        self.section, self.prefix, self.work = section, prefix, work
        self.acknowledged: dict[str, str] = {}
        self.done = threading.Event()

    def store(self) -> Witness:
        return Witness(clients.client(self.section), self.section.bucket, self.acknowledged.__setitem__)

    def produce(self, number: int) -> None:
        chance = Random(number)
        rollout = Rollout(self.store(), self.prefix, f"producer-{number}", POLICY, DROPS)
        while not self.done.is_set():
            ledger = rollout.look()
            if ledger.head is not None:
                rollout.start(ledger.head)
            for uid in [uid for uid in rollout.in_flight if chance.random() < 0.5]:
                rollout.admit(uid, ledger.head or 0, False, chance.randbytes(16))
            sleep(PAUSE_S)

    def train(self) -> None:
        try:
            trainer = Trainer(
                self.store(), self.prefix, "trainer", POLICY, DROPS, _directory(self.work / "trainer"), 3, 100.0,
                monotonic, sleep,
            )  # fmt: skip
            for _ in range(STEPS):
                trainer.step()
        finally:
            self.done.set()

    def read(self) -> None:
        log, work = CommitLog(self.store(), self.prefix, "reader"), _directory(self.work / "reader")
        while not self.done.is_set():
            ledger = log.sync()
            if ledger.head is not None:
                restore(log.store, self.prefix, ledger.states[ledger.head], work)
            sleep(PAUSE_S)


def _directory(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.server
@pytest.mark.slow
def test_a_bad_network_loses_and_doubles_nothing(proxy: FaultProxy, s3: S3Endpoint, tmp_path: Path) -> None:
    run = Run(StoreSection(endpoint_url=proxy.url), "test/bad-network/", tmp_path)
    parts = [run.train, run.read, *(partial(run.produce, n) for n in range(PRODUCERS))]
    with ThreadPoolExecutor(len(parts)) as pool:
        for future in [pool.submit(part) for part in parts]:
            future.result(timeout=240)

    assert set(proxy.faults) == set(Fault), "every fault occurred"
    assert 0.02 < proxy.faults.total() / proxy.requests < 0.08
    straight = ObjectStore.connect(StoreSection(endpoint_url=s3.endpoint_url))
    found = audit(straight, run.prefix, run.acknowledged)
    assert found.findings == []
    assert len(found.account.trained) == STEPS * POLICY.groups_per_step
