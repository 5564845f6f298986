"""Disturbances on purpose: distributions as declared, equal for equal seeds, and nothing else is changed."""

from __future__ import annotations

import random
from statistics import fmean, median

import pytest
from pydantic import TypeAdapter

from envs.calculator import Calculator
from envs.injection import Injected
from rl.config.injection import InjectionSection, Latency
from rl.errors import InjectedFailure
from rl.stream import derive_seed
from rl.trajectory import Problem

PROBLEM = Problem(0, "c", 0, derive_seed("injection", 1))
LATENCY: TypeAdapter = TypeAdapter(Latency)


def draws(count: int = 4000, **section: object) -> list[float]:
    rng = random.Random(1)
    return [LATENCY.validate_python(section).draw(rng) for _ in range(count)]


def test_latencies_are_distributed_as_declared() -> None:
    assert set(draws(type="constant", seconds=2.0)) == {2.0}
    normal = draws(type="normal", mean=1.0, deviation=0.5)
    assert fmean(normal) == pytest.approx(1.0, abs=0.05) and min(normal) == 0.0
    lognormal = sorted(draws(type="lognormal", median=2.0, sigma=1.0))
    assert median(lognormal) == pytest.approx(2.0, rel=0.1)
    assert lognormal[int(0.99 * len(lognormal))] == pytest.approx(20.0, rel=0.25)
    pareto = draws(type="pareto", least=1.0, shape=1.5)
    assert min(pareto) >= 1.0 and max(pareto) > 50 * median(pareto)


async def episode(section: InjectionSection, seed: int) -> tuple[list[str], Injected]:
    environment = Injected(Calculator(), section, seed)
    said = [(await environment.reset(PROBLEM))[-1].content]
    try:
        while True:
            step = await environment.step(environment.expert_action())
            said.append(step.observation.content)
            if step.terminated:
                break
    except InjectedFailure as failure:
        said.append(str(failure))
    await environment.close()
    return said, environment


async def test_latency_changes_nothing_but_time_and_is_told_as_spans() -> None:
    section = InjectionSection.model_validate(
        {
            "reset_latency": {"type": "constant", "seconds": 1.0},
            "step_latency": {"type": "lognormal", "median": 1.0},
            "time_scale": 0.001,
        }
    )
    plain, quiet = await episode(InjectionSection(), 1)
    slow, delayed = await episode(section, 1)
    assert slow == plain and not quiet.spans
    assert [span.stage for span in delayed.spans] == ["injected"] * len(plain)
    assert all(span.end >= span.start for span in delayed.spans)
    assert delayed.tools == Calculator().tools


async def test_equal_seeds_fail_alike_and_others_do_not() -> None:
    section = InjectionSection(step_failure=0.4)
    ends = [(await episode(section, seed))[0] for seed in range(20)]
    assert ends == [(await episode(section, seed))[0] for seed in range(20)]
    assert len({tuple(end) for end in ends}) > 1
    assert any("step failed on purpose (injection.step_failure 0.4)" in end[-1] for end in ends)
