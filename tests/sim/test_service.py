"""Runs as jobs of a service: places, rounds, quotas and priorities are those of `rl`, seen in what starts when."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rl.placement import HardwareClass
from sim.cluster import Cluster
from sim.config import DomainWork, Latency, PoolSection, TenantSection
from tests.sim.scenes import STEADY, VARIED, scenario

SHARED = {"alpha": 0, "mode": "sync_plus", "tenants": 3}


def played(steps: int = 3, **more) -> Cluster:
    cluster = Cluster(scenario(**SHARED | more), steps)
    cluster.simulate(1e5)
    assert all(len(run.steps) == steps for run in cluster.runs)
    return cluster


def test_with_one_place_jobs_run_one_after_another_by_priority_then_arrival():
    shares = tuple(TenantSection(priority=priority, begins=5.0) for priority in (0, 0, 1))
    runs = played(running=1, shares=shares).runs
    ends = [run.steps[-1].committed for run in runs]
    order = sorted(range(3), key=lambda n: ends[n])
    assert order == [2, 0, 1]
    for before, after in pairwise(order):
        first = runs[after].steps[0]
        assert first.asked == pytest.approx(ends[before] + 5.0, abs=1.0)


def test_a_job_that_is_handed_in_later_begins_later():
    shares = (TenantSection(), TenantSection(submitted=40.0, begins=2.0))
    first, late = played(tenants=2, shares=shares).runs
    assert first.steps[0].asked == 0.0 and late.steps[0].asked == pytest.approx(42.0, abs=0.5)


def test_in_rounds_nobody_is_a_version_ahead():
    domains = tuple(
        STEADY.model_copy(update={"name": name, "turns": (n, n)}) for name, n in (("short", 2), ("long", 8))
    )
    shares = tuple(TenantSection(domains=(d.name,)) for d in domains)
    both = {"domains": domains, "shares": shares, "tenants": 2}
    free, rounds = played(**both), played(**both, schedule="rounds")
    quick, slow = rounds.runs
    for before, after in zip(slow.steps, quick.steps[1:], strict=False):
        assert after.batch > before.committed
    assert free.runs[0].steps[1].committed < free.runs[1].steps[0].committed
    assert free.now == pytest.approx(rounds.now, rel=0.1), "the slow one alone decides"


def test_the_first_round_waits_for_every_job_that_has_a_place():
    """One whose first version comes late is in it, as in a service: none rolls out alone before the others."""
    shares = (TenantSection(), TenantSection(begins=10.0))
    first, late = played(steps=2, domains=(STEADY,), shares=shares, tenants=2, schedule="rounds").runs
    assert first.steps[0].batch == pytest.approx(late.steps[0].batch, abs=1.0) and first.steps[0].batch > 10.0
    alone = played(steps=2, domains=(STEADY,), shares=shares, tenants=2).runs[0]
    assert first.steps[0].batch == pytest.approx(alone.steps[0].batch + 10.0, abs=1.0)


def test_a_quota_is_never_exceeded_and_holds_up_nobody_else():
    shares = (TenantSection(quota=4), TenantSection(), TenantSection())
    cluster = Cluster(scenario(VARIED, **SHARED, shares=shares), 3)
    most = np.zeros(3)
    for until in np.arange(2.0, 1000.0, 2.0):
        cluster.simulate(until)
        most = np.maximum(most, [len(run.in_flight) * run.scenario.members for run in cluster.runs])
    assert most.tolist() == [4, 16, 16]
    limited, *others = (run.steps[-1].committed for run in cluster.runs)
    assert limited > 2 * max(others)


def test_what_can_never_run_is_refused():
    with pytest.raises(ValidationError, match="quota"):
        scenario(**SHARED, shares=(TenantSection(quota=3),))
    with pytest.raises(ValidationError, match="no domain 'chess'"):
        scenario(**SHARED, shares=(TenantSection(domains=("chess",)),))


@pytest.mark.parametrize("priority", [0, 1])
def test_who_comes_late_to_full_environments_gets_on(priority):
    """Two tenants whose bounds allow more than there is room for, and a third one that comes when all is taken."""
    long = VARIED.model_copy(update={"turns": (8, 16)})
    shares = (TenantSection(priority=priority), TenantSection(priority=priority), TenantSection(submitted=100.0))
    cluster = Cluster(scenario(long, alpha=1, tenants=3, max_concurrent=24, shares=shares))
    cluster.simulate(4000.0)
    first, second, late = (len(run.steps) for run in cluster.runs)
    assert late >= (1 if priority else 0.7 * first), (first, second, late)
    assert abs(first - second) <= 0.2 * first


def test_environments_of_a_domain_are_a_limit_and_hold_up_no_other_domain():
    domains = tuple(
        VARIED.model_copy(update={"name": n, "environments": most}) for n, most in (("few", 8), ("many", None))
    )
    cluster = Cluster(scenario(domains=domains, alpha=2), 6)
    most = {"few": 0, "many": 0}
    for until in np.arange(1.0, 400.0, 1.0):
        cluster.simulate(until)
        flights = [flight.domain.name for flight in cluster.runs[0].in_flight.values()]
        most = {name: max(count, 4 * flights.count(name)) for name, count in most.items()}
    assert most["few"] == 8 and most["many"] == 24 and len(cluster.runs[0].steps) == 6


def test_a_batch_of_blocks_is_what_was_drawn_for_it():
    cluster = Cluster(scenario(VARIED, alpha=2, batches="blocks"), 5)
    cluster.simulate(1e4)
    free = Cluster(scenario(VARIED, alpha=2), 5)
    free.simulate(1e4)
    assert cluster.runs[0].log.low_water == 20, "the first 20 problems, and none beyond"
    assert free.now < cluster.now


POOL = PoolSection(hardware="H800", gpus=2, hardware_class=HardwareClass.COMPUTE_GPU, max_sequences=8)
CROWD = {"alpha": 1, "tenants": 8, "pools": (POOL,)}


def rate(domain: DomainWork, **more: Any) -> tuple[float, list[int]]:
    """Trajectories per second, and those in flight at every tenth second."""
    cluster, in_flight = Cluster(scenario(domain, **CROWD | more), 100), []
    for until in np.arange(10.0, 1500.0, 10.0):
        cluster.simulate(until)
        in_flight.append(sum(run.scenario.members * len(run.in_flight) for run in cluster.runs))
    return cluster.world.totals.finished / cluster.now, in_flight


def test_adaptive_concurrency_fills_engines_that_wait_for_environments():
    waiting = STEADY.model_copy(update={"step": Latency(mean=30.0, sd=5.0)})
    few, _ = rate(waiting, max_concurrent=16)
    many, _ = rate(waiting, max_concurrent=192)
    found, in_flight = rate(waiting, max_concurrent=192, adaptive=True)
    assert many > 2 * few
    assert found > 0.9 * many and max(in_flight) > 96


def test_adaptive_concurrency_leaves_room_in_full_caches():
    long = STEADY.model_copy(update={"response_tokens": 40_000, "step": Latency(mean=1.0)})
    _, everything = rate(long, max_concurrent=192)
    _, in_flight = rate(long, max_concurrent=192, adaptive=True)
    assert max(everything) == 192 and max(in_flight[10:]) < 96


def test_adaptive_concurrency_needs_a_limit():
    with pytest.raises(ValidationError, match="adaptive needs max_concurrent"):
        scenario(adaptive=True)
