"""Time under the virtual clock: by hand for what is steady, and the same whatever the tick."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cluster import Cluster
from sim.config import Latency, RewardSection
from sim.engines import PROMPT_SHARE
from sim.rewards import Rewards
from sim.simulate import simulate
from tests.sim.scenes import STEADY, VARIED, scenario


def alone(**more):
    """A single trajectory of steady turns, under alpha 0."""
    sizes = {"groups_per_step": 1, "group_size": 1, "steps": 1, "warmup": 0}
    return scenario(STEADY, **sizes, alpha=0, mode="sync_plus", tick=0.05, **more)


def test_one_trajectory_takes_the_sum_of_its_parts():
    one = alone(reward=RewardSection(cold_start=0.0))
    cluster = Cluster(one, steps=1)
    cluster.simulate(1e4)
    engines, model, work = cluster.world.engines, cluster.model, STEADY
    per_token, context = 0.0, work.prompt_tokens
    for _ in range(4):
        middle = np.full(2, context + work.response_tokens / 2)
        per_token += float(engines.iteration(np.ones(2), middle)[0]) * work.response_tokens
        context += work.response_tokens + work.observation_tokens
    flops = 989.5e12 * one.efficiency.prefill * PROMPT_SHARE
    read = (work.prompt_tokens + 3 * work.observation_tokens) * model.token_flops / flops
    expected = 2.0 + 4 * 3.0 + 1.0 + per_token + read
    assert cluster.runs[0].steps[0].batch == pytest.approx(expected, abs=0.25)


@pytest.mark.parametrize("alpha, mode", [(0, "sync_plus"), (0, "sync"), (2, "rollart"), (2, "six_steps")])
def test_the_tick_hardly_matters(alpha, mode):
    long = STEADY.model_copy(update={"turns": (20, 20), "step": Latency(mean=5.0)})
    base = scenario(long, alpha=alpha, mode=mode, steps=4, warmup=1)
    coarse, fine = simulate(base), simulate(base.model_copy(update={"tick": 0.4}))
    assert coarse.step_s == pytest.approx(fine.step_s, rel=0.05)


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    first, again, other = (simulate(scenario(seed=seed)) for seed in (0, 0, 1))
    assert first == again and first.step_s != other.step_s


def test_in_lockstep_a_turn_takes_as_long_as_its_slowest():
    steady, spread = (
        STEADY.model_copy(update={"step": Latency(mean=10.0, sd=sd, shape="normal")}) for sd in (0.0, 3.0)
    )
    ratio = {
        mode: simulate(scenario(spread, alpha=0, mode=mode)).rollout_s
        / simulate(scenario(steady, alpha=0, mode=mode)).rollout_s
        for mode in ("sync_plus", "sync")
    }
    assert 1.0 < ratio["sync_plus"] < ratio["sync"]


def test_what_stands_still_makes_no_tokens():
    cluster = Cluster(scenario(STEADY, alpha=1))
    world = cluster.world
    cluster.simulate(7.0)
    world.stand()
    before = world.contexts()
    for _ in range(200):
        world.advance(world.now + world.tick)
    assert (world.contexts() == before).all()
    world.go_on(200 * world.tick)
    world.advance(world.now + world.tick)
    assert (world.contexts() > before).any()


def test_dedicated_rewards_queue_and_functions_do_not():
    slow = VARIED.model_copy(update={"score": Latency(mean=5.0)})
    one_slot = RewardSection(type="dedicated", slots=1, gpus=1)
    queued = simulate(scenario(slow, alpha=0, mode="sync_plus", reward=one_slot))
    free = simulate(scenario(slow, alpha=0, mode="sync_plus", reward=RewardSection(cold_start=0.5)))
    assert queued.rollout_s >= 16 * 5.0 > free.rollout_s
    assert 0.5 < queued.reward_utilisation <= 1.0


@given(
    calls=st.lists(st.lists(st.tuples(st.floats(0, 9), st.floats(0.1, 20)), min_size=1, max_size=8), max_size=8),
    keep=st.floats(5, 50),
)
def test_functions_are_warm_as_one_after_another_would_find_them(calls, keep):
    """Against the plain definition: of what was idle before this call, that which waited longest."""
    ours, idle, cold = Rewards(RewardSection(cold_start=2.0, keep_warm=keep)), [], 0
    for number, call in enumerate(calls):
        asked, work = (np.array(column) for column in zip(*sorted(call), strict=True))
        asked, new = asked + 10 * number, []
        found = ours.ends(asked, work)
        idle = [moment for moment in sorted(idle) if moment >= asked[0] - keep]
        for at, seconds, end in zip(asked, work, found, strict=True):
            warm = bool(idle) and idle[0] <= at
            if warm:
                idle.pop(0)
            cold += not warm
            assert end == pytest.approx(at + seconds + (0.0 if warm else 2.0))
            new.append(float(end))
        idle += new
    assert ours.cold_starts == cold


@pytest.mark.parametrize("at_once, off", [(2, 0.05), (4, 0.08)])
def test_turns_that_are_played_as_one_take_about_as_long(at_once, off):
    """On engines that are overloaded by trajectories that all do the same at the same time, which is the worst case."""
    long = STEADY.model_copy(update={"turns": (40, 40), "prefix_hit": 0.8, "observation_tokens": 400})
    base = scenario(long, alpha=1, groups_per_step=32, steps=5)
    one, many = simulate(base), simulate(base.model_copy(update={"turns_at_once": at_once}))
    assert many.step_s == pytest.approx(one.step_s, rel=off)
    assert many.tokens_per_s * many.step_s == pytest.approx(one.tokens_per_s * one.step_s, rel=1e-6)
    assert many.engine_idle == pytest.approx(one.engine_idle, abs=0.05)
