"""Engines: the queue of prompts, the roofline, and who gets the next trajectory, each against the plain definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.placement import HardwareClass
from sim.config import Efficiency, PoolSection
from sim.engines import Engines, least_loaded
from sim.profiles import language_model

C, B = HardwareClass.COMPUTE_GPU, HardwareClass.BANDWIDTH_GPU


def engines(model: str = "Qwen3-8B", **more: float) -> Engines:
    pools = (
        PoolSection(hardware="H800", gpus=2, hardware_class=C),
        PoolSection(hardware="H20", gpus=2, hardware_class=B),
    )
    return Engines(pools, language_model(model), Efficiency(**more))


@settings(max_examples=40)
@given(
    batches=st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.floats(0, 50), st.floats(0, 5)), min_size=1, max_size=12),
        min_size=1,
        max_size=4,
    )
)
def test_prompts_are_read_one_after_another_as_they_arrive(batches):
    ours, free = engines(), [0.0] * 4
    for batch in batches:
        which, arrival, seconds = (np.array(column) for column in zip(*batch, strict=True))
        found = ours.queue(which, arrival, seconds)
        for at in sorted(range(len(batch)), key=lambda i: batch[i][1]):
            engine, came, takes = batch[at]
            free[engine] = max(free[engine], came) + takes
        assert ours.free_at == pytest.approx(free, abs=1e-4)
        assert all(found >= arrival + seconds - 1e-4)


@settings(max_examples=60)
@given(load=st.lists(st.integers(0, 9), min_size=1, max_size=8), count=st.integers(0, 30))
def test_newcomers_go_one_by_one_to_the_least_loaded(load, count):
    plain, expected = list(load), [0] * len(load)
    for _ in range(count):
        at = plain.index(min(plain))
        plain[at] += 1
        expected[at] += 1
    assert np.bincount(least_loaded(np.array(load), count), minlength=len(load)).tolist() == expected


def test_compute_reads_prompts_faster_and_bandwidth_answers_faster():
    ours = engines()
    reading = ours.prompt_seconds(np.arange(4), np.full(4, 4000.0), np.zeros(4))
    assert reading[2] / reading[0] == pytest.approx(989.5 / 148, rel=0.01)
    alone = ours.iteration(np.ones(4), np.full(4, 1e5))
    assert alone[2] < alone[0]


def test_an_iteration_is_bound_by_memory_then_by_computing():
    ours = engines(iteration=0.0)
    weights = language_model("Qwen3-8B").weight_bytes / (4.0e12 * 0.7)
    assert ours.iteration(np.ones(4), np.zeros(4))[2] == pytest.approx(weights)
    many = ours.iteration(np.full(4, 512.0), np.zeros(4))
    assert many[2] == pytest.approx(512 * 2 * 8.19e9 / (148e12 * 0.6))


def test_a_mixture_reads_more_experts_the_more_sequences_there_are():
    ours = engines("Qwen3-30B-A3B", iteration=0.0)
    one, many = ours.iteration(np.ones(4), np.zeros(4)), ours.iteration(np.full(4, 64.0), np.zeros(4))
    model = language_model("Qwen3-30B-A3B")
    assert one[0] == pytest.approx(2 * model.touched / (3.35e12 * 0.7), rel=0.02)
    assert one[0] < many[0] <= model.weight_bytes / (3.35e12 * 0.7) * 1.01


def test_a_full_cache_makes_sequences_wait():
    ours = engines()
    running = np.full(4, 100.0)
    fits, over = (ours.rates(running, n * ours.room, np.zeros(4))[0] for n in (1, 2))
    assert np.all(over < 0.8 * fits)
