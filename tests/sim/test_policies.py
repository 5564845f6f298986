"""What the simulator drives are the policies of the running system: their invariants hold under its clock."""

from __future__ import annotations

import pytest

from rl.account import Account
from rl.ledger import Ledger
from rl.records import Record
from sim.cluster import Cluster
from sim.config import Redundancy
from tests.sim.scenes import VARIED, scenario

STEPS = 6
FAILING = VARIED.model_copy(update={"failure": 0.15})


def watched(monkeypatch: pytest.MonkeyPatch, **more) -> tuple[Cluster, Account]:
    """A run to its last step, and an account of its log that believes nothing."""
    records: list[Record] = []
    fold = Ledger.apply

    def apply(self: Ledger, record: Record) -> None:
        records.append(record)
        fold(self, record)

    monkeypatch.setattr(Ledger, "apply", apply)
    cluster = Cluster(scenario(**more), steps=STEPS)
    cluster.simulate(1e5)
    account = Account()
    for record in {record.lsn: record for record in records}.values():
        account.note(record)
    return cluster, account


@pytest.mark.parametrize(
    "mode, alpha",
    [("sync", 0), ("sync_plus", 0), ("one_off", 1), *((m, a) for m in ("rollart", "six_steps") for a in (1, 3))],
)
def test_nothing_is_lost_doubled_or_too_old(monkeypatch, mode, alpha):
    cluster, account = watched(monkeypatch, domain=FAILING, alpha=alpha, mode=mode)
    run = cluster.runs[0]
    assert len(run.steps) == STEPS and not account.findings, account.findings
    assert len(account.trained) == STEPS * 4
    assert 0 <= max(step.lag for step in run.steps) <= alpha
    assert cluster.world.totals.failed > 0, "nothing failed: the scenario tries nothing"


def test_every_trajectory_in_flight_belongs_to_a_group_that_is_open(monkeypatch):
    cluster, _ = watched(monkeypatch, domain=FAILING, alpha=2)
    run, world = cluster.runs[0], cluster.world
    numbers = {cluster._numbers[0, uid] for uid in run.in_flight}
    assert set(world.slots.group[world.slots.phase != 0].tolist()) <= numbers
    assert all(run.log.is_open(uid) for uid in run.in_flight)


def test_first_finished_is_quicker_and_gives_up_by_name(monkeypatch):
    plain, _ = watched(monkeypatch, alpha=0, mode="sync_plus")
    extra = Redundancy(mode="first_finished", extra_groups=2, extra_members=2)
    quick, account = watched(monkeypatch, alpha=0, mode="sync_plus", redundancy=extra)
    assert quick.now < plain.now
    assert not account.findings and set(account.abandoned.values()) == {"surplus"}


def test_spares_replace_failed_members_without_a_second_run(monkeypatch):
    often = VARIED.model_copy(update={"failure": 0.1})
    cluster, account = watched(monkeypatch, domain=often, alpha=1, redundancy=Redundancy(extra_members=3))
    assert not account.findings and len(account.trained) == STEPS * 4
    assert cluster.world.totals.failed > 0


def test_tenants_share_engines_and_trainer_fairly():
    cluster = Cluster(scenario(alpha=0, mode="sync_plus", tenants=3), steps=4)
    cluster.simulate(1e5)
    assert [len(run.steps) for run in cluster.runs] == [4, 4, 4]
    one = Cluster(scenario(alpha=0, mode="sync_plus"), steps=4)
    one.simulate(1e5)
    assert cluster.now < 3 * one.now, "sharing is no quicker than one after another"
