"""Whatever tenants, priorities, quotas, domains and loads there are: everybody gets on, and nothing lies idle for long.

Under the virtual clock, with the policies of the running system, failures of environments and version changes included.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rl.config.tenants import QueueSection
from rl.placement import HardwareClass
from sim.cluster import Cluster
from sim.config import Efficiency, PoolSection, Scenario, TenantSection, TrainerSection
from tests.sim.scenes import STEADY, VARIED, scenario

LOOKS, EVERY = 12, 250.0
"""Looks at a cluster, and the seconds between them."""
GROUP = 4
PATIENCE = QueueSection().patience
QUICKLY = (Phase.explicit, Phase.generate)
"""A crowd that fails is told as it is: to make it smaller takes minutes."""

slow = VARIED.model_copy(update={"name": "slow", "turns": (8, 20), "failure": 0.1})
quick = STEADY.model_copy(update={"name": "quick", "turns": (1, 3), "weight": 2.0})


@st.composite
def crowds(draw: st.DrawFn) -> Scenario:
    """Some tenants on too few environments."""
    tenants = draw(st.integers(1, 5))
    shares = st.builds(
        TenantSection,
        domains=st.sampled_from([(), ("slow",), ("quick",)]),
        priority=st.integers(0, 2),
        weight=st.sampled_from([0.5, 1.0, 2.0]),
        quota=st.sampled_from([None, GROUP, 3 * GROUP]),
        submitted=st.sampled_from([0.0, 60.0, 400.0]),
    )
    mode, alpha = draw(
        st.sampled_from([("sync_plus", 0), ("one_off", 1), ("six_steps", 1), ("rollart", 1), ("rollart", 3)])
    )
    limit = draw(st.sampled_from([None, 2 * GROUP, 4 * GROUP]))
    room = draw(st.sampled_from([None, 3 * GROUP, 10 * GROUP]))
    late = draw(st.sampled_from(["wait", "draw_again"])) if alpha else "wait"
    return scenario(
        domains=(slow.model_copy(update={"environments": limit}), quick),
        tenants=tenants,
        shares=tuple(draw(shares) for _ in range(tenants)),
        running=draw(st.sampled_from([None, tenants])),
        max_concurrent=room,
        adaptive=room is not None and draw(st.booleans()),
        mode=mode,
        alpha=alpha,
        late=late,
        seed=draw(st.integers(0, 99)),
    )


def followed(crowd: Scenario) -> tuple[Cluster, np.ndarray]:
    """A cluster, and how many steps each run had made at each look."""
    cluster, seen = Cluster(crowd), []
    for look in range(LOOKS):
        cluster.simulate((look + 1) * EVERY)
        seen.append([len(run.steps) for run in cluster.runs])
    return cluster, np.array(seen)


@pytest.mark.slow
@settings(max_examples=30, phases=QUICKLY)
@given(crowds())
def test_every_tenant_gets_on(crowd: Scenario) -> None:
    """Those of the highest priority make steps, all others start one of so many groups at least: one that lacks
    environments is not passed over, so it may wait twice."""
    cluster, steps = followed(crowd)
    started = np.array([len(run.durations) + len(run.in_flight) for run in cluster.runs])
    priority = np.array([share.priority for share in crowd.shares])
    what = (crowd.model_dump(exclude_defaults=True), steps.tolist(), started.tolist())
    first = priority == priority.max()
    assert (steps[-1] > steps[LOOKS // 2])[first].all(), what
    assert (started >= started.sum() // (2 * (PATIENCE + len(started))) - 1).all(), what
    for run in cluster.runs:
        assert len(run.in_flight) + len(run.offered) <= run.policy.buffer_groups
        assert all(step.lag <= run.policy.alpha for step in run.steps)


@pytest.mark.slow
@settings(max_examples=10, phases=QUICKLY)
@given(st.integers(2, 5), st.integers(0, 99), st.sampled_from([0, 1, 2]), st.sampled_from([3, 6, 12]))
def test_tenants_that_are_alike_get_alike(tenants: int, seed: int, alpha: int, room: int) -> None:
    mode = "rollart" if alpha else "sync_plus"
    comes = tuple(TenantSection(submitted=50.0 * n) for n in range(tenants))
    more: dict[str, Any] = {"max_concurrent": room * GROUP, "mode": mode, "alpha": alpha, "seed": seed}
    _, steps = followed(scenario(quick, tenants=tenants, shares=comes, **more))
    made = steps[-1] - steps[2]
    assert made.min() >= 0.6 * made.max() - 1, steps.tolist()


@pytest.mark.slow
def test_ten_thousand_trajectories_of_many_tenants_keep_nobody_waiting() -> None:
    """Forty-eight tenants of three priorities with weights and quotas, together far above what may run at once."""
    pool = PoolSection(hardware="H800", gpus=128, hardware_class=HardwareClass.COMPUTE_GPU, max_sequences=128)
    shares = tuple(
        TenantSection(priority=n % 3, weight=(1.0, 2.0)[n % 2], quota=(None, None, 240)[n // 3 % 3], submitted=0.2 * n)
        for n in range(48)
    )
    crowd = scenario(
        domains=(slow.model_copy(update={"environments": 9000}), quick), pools=(pool,), tenants=48, shares=shares,
        max_concurrent=10_000, alpha=1, group_size=8, groups_per_step=32, trainer=TrainerSection(gpus=256),
        efficiency=Efficiency(train_fixed=0.5),
    )  # fmt: skip
    cluster, most = Cluster(crowd), 0
    halfway: list[int] = []
    for until in np.arange(25.0, 901.0, 25.0):
        cluster.simulate(until)
        most = max(most, int((cluster.world.slots.phase != 0).sum()))
        halfway = [len(run.steps) for run in cluster.runs] if until == 450.0 else halfway
    assert 9_500 < most <= 10_000
    assert all(len(run.steps) > before for run, before in zip(cluster.runs, halfway, strict=True))
