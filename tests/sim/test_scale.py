"""Thousands of GPUs and ten thousand trajectories at once: what holds on a small cluster holds there."""

from __future__ import annotations

import numpy as np
import pytest

from rl.placement import HardwareClass
from sim.cluster import Cluster
from sim.config import DomainWork, Latency, PoolSection, Scenario, TrainerSection
from sim.validation.systems import week
from sim.validation.workloads import change

HOURS = 3600.0


def digest(cluster: Cluster) -> tuple[object, ...]:
    slots = cluster.world.slots
    return cluster.runs[0].steps, float(slots.context.sum()), slots.turn.tolist(), cluster.world.totals.finished


@pytest.mark.slow
def test_ten_thousand_trajectories_at_once():
    horizon = 1.5 * HOURS
    many = change(week(horizon), groups_per_step=1000)
    first, again = Cluster(many), Cluster(many)
    at_once = []
    for until in np.arange(300.0, horizon + 1, 300.0):
        first.simulate(until)
        playing = first.world.slots.group[first.world.slots.phase != 0]
        at_once.append(len(playing))
        run = first.runs[0]
        assert set(playing.tolist()) <= {first._numbers[0, uid] for uid in run.in_flight}
        assert len(run.in_flight) + len(run.offered) <= run.policy.buffer_groups
    assert max(at_once) >= 10_000, at_once
    assert len(run.steps) >= 2
    for until in np.arange(300.0, horizon + 1, 300.0):
        again.simulate(until)
    assert digest(first) == digest(again)


@pytest.mark.slow
def test_an_update_starves_no_turn_though_thousands_ask_at_once():
    """All turns stand still for an update, go on at once with nothing in the caches, and go through the router: large
    prompts among small ones, on engines whose caches are full, wait little longer than small ones."""
    large = DomainWork(
        name="large", weight=0.06, turns=(4, 8), prompt_tokens=100_000, max_tokens=200_000, response_tokens=150,
        step=Latency(mean=2, sd=1), reset=Latency(mean=5, sd=3),
    )  # fmt: skip
    small = DomainWork(
        name="small", turns=(10, 20), prompt_tokens=3000, response_tokens=300, step=Latency(mean=0.5, sd=0.2),
        reset=Latency(mean=1, sd=0.5),
    )  # fmt: skip
    pool = PoolSection(hardware="H800", gpus=32, hardware_class=HardwareClass.BANDWIDTH_GPU, max_sequences=256)
    scenario = Scenario(
        domains=(large, small), pools=(pool,), trainer=TrainerSection(gpus=8), groups_per_step=160, routing="turn"
    )
    cluster = Cluster(scenario)
    cluster.simulate(60.0)
    cluster.world.stand()
    cluster.simulate(75.0)
    cluster.world.forget(0)
    cluster.world.go_on(15.0)
    router = cluster.world.routing.router
    began: dict[str, float] = {}
    longest = {"large": 0.0, "small": 0.0}
    for until in np.arange(76.0, 300.0, 2.0):
        cluster.simulate(until)
        waiting = {f"{request.id} {request.trajectory} {request.prompt}": request for request, _ in router._waiting}
        began = {name: began.get(name, until) for name in waiting}
        for name, request in waiting.items():
            longest[request.domain] = max(longest[request.domain], until - began[name])
    assert longest["small"] > 0, "nothing waits: the scenario tries nothing"
    assert longest["large"] <= 1.5 * longest["small"], longest
