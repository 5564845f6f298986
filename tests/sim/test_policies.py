"""What the simulator drives are the policies of the running system: their invariants hold under its clock."""

from __future__ import annotations

import numpy as np
import pytest

from rl.account import Account
from rl.ledger import Ledger
from rl.placement import HardwareClass
from rl.records import Record
from sim.cluster import Cluster
from sim.config import Efficiency, PoolSection, Redundancy
from sim.run import Run
from sim.simulate import simulate
from tests.sim.scenes import STEADY, VARIED, scenario

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


def test_turns_go_where_the_router_sends_them(monkeypatch):
    """Through the router of the running system nothing is lost either, and engines that are full make turns wait."""
    pools = (PoolSection(hardware="H800", gpus=2, hardware_class=HardwareClass.COMPUTE_GPU, max_sequences=3),)
    cluster, account = watched(monkeypatch, domain=FAILING, alpha=1, routing="turn", pools=pools)
    free, _ = watched(monkeypatch, domain=FAILING, alpha=1, routing="turn")
    assert not account.findings and len(account.trained) == STEPS * 4
    assert cluster.now > 1.2 * free.now, "three turns at once on an engine, and nothing waited"
    router = cluster.world.routing.router
    playing = set(np.flatnonzero(cluster.world.slots.phase).tolist())
    assert {int(request.id) for request, _ in router._waiting} <= playing
    assert all(router.running(str(engine)) <= 3 for engine in range(2))


def test_environments_are_shared_between_tenants():
    crowded = scenario(alpha=1, tenants=3, max_concurrent=24)
    cluster = Cluster(crowded, steps=4)
    most = 0
    for until in np.arange(5.0, 2000.0, 5.0):
        cluster.simulate(until)
        most = max(most, int((cluster.world.slots.phase != 0).sum()))
    assert most == 24 and [len(run.steps) for run in cluster.runs] == [4, 4, 4]


def test_a_batch_is_asked_for_only_when_there_may_be_one(monkeypatch):
    """What `Selection.missing` says is never too much: asked at every end of a group, the run is the same."""
    lazy, _ = watched(monkeypatch, alpha=2, domain=FAILING)
    monkeypatch.setattr(Run, "_may_be_enough", lambda self: True)
    eager, _ = watched(monkeypatch, alpha=2, domain=FAILING)
    assert lazy.runs[0].steps == eager.runs[0].steps


def test_under_alpha_1_commits_come_in_pairs_that_cost_no_throughput():
    """What starts together ends together: two steps, one right after the other, take the slowest group and a training,
    the least that `rl.modes` allows."""
    quick = Efficiency(push_bandwidth=1e12, pull_bandwidth=1e12)
    found = simulate(scenario(STEADY, mode="rollart", alpha=1, steps=20, warmup=6, efficiency=quick))
    waits = np.diff([step.committed for step in found.steps])[6:]
    short, long = sorted((waits[::2], waits[1::2]), key=np.mean)
    assert short == pytest.approx(found.train_s, rel=0.02) and long.min() > 3 * short.max()
    assert 2 * waits.mean() == pytest.approx(np.median(found.durations) + found.train_s, rel=0.05)


def test_tenants_share_engines_and_trainer_fairly():
    cluster = Cluster(scenario(alpha=0, mode="sync_plus", tenants=3), steps=4)
    cluster.simulate(1e5)
    assert [len(run.steps) for run in cluster.runs] == [4, 4, 4]
    one = Cluster(scenario(alpha=0, mode="sync_plus"), steps=4)
    one.simulate(1e5)
    assert cluster.now < 3 * one.now, "sharing is no quicker than one after another"
