"""The work and the clusters of the published runs, as far as they are described; the rest is chosen or fitted.

Published: turns, GPUs, batch and group sizes, models, context. Fitted (see `rows`): what a row names. Chosen, once and
for all rows: tokens per turn of the other domains, their latencies, and which environments fail how often.
"""

from __future__ import annotations

from typing import Any

from rl.placement import HardwareClass
from sim.config import (
    DomainWork,
    Efficiency,
    Latency,
    PoolSection,
    RewardSection,
    Scenario,
    TrainerSection,
    WeightsSection,
)

FITTED = Efficiency(
    iteration=0.004,
    parallel=0.004,
    train=0.193,
    train_fixed=40.0,
)
"""Of everything below."""

TURN_SPREAD = 0.05
"""Of a turn's response length within one trajectory, in all domains."""

COMPUTE, BANDWIDTH = HardwareClass.COMPUTE_GPU, HardwareClass.BANDWIDTH_GPU

SWE = DomainWork(
    name="swe",
    turns=(30, 50),
    prompt_tokens=2000,
    observation_tokens=350,
    response_tokens=188,
    problem_spread=0.08,
    member_spread=0.12,
    turn_spread=TURN_SPREAD,
    step=Latency(mean=0.35, sd=0.1),
    reset=Latency(mean=8.0, sd=10.0),
    score=Latency(mean=5.0, sd=2.0),
    runs_on=COMPUTE,
)
WEBSHOP = DomainWork(
    name="webshop",
    turns=(5, 30),
    prompt_tokens=800,
    observation_tokens=500,
    response_tokens=150,
    problem_spread=0.1,
    member_spread=0.2,
    turn_spread=TURN_SPREAD,
    step=Latency(mean=0.3, sd=0.3),
    reset=Latency(mean=2.0, sd=1.0),
    score=Latency(mean=0.1),
    runs_on=COMPUTE,
)
FROZEN_LAKE = DomainWork(
    name="frozen_lake",
    turns=(20, 100),
    prompt_tokens=400,
    observation_tokens=150,
    response_tokens=70,
    problem_spread=0.1,
    member_spread=0.2,
    turn_spread=TURN_SPREAD,
    prefix_hit=0.75,
    step=Latency(mean=0.02, sd=0.01),
    reset=Latency(mean=0.5, sd=0.2),
    score=Latency(mean=0.05),
    runs_on=COMPUTE,
)
MATH = DomainWork(
    name="math",
    turns=(1, 4),
    prompt_tokens=300,
    observation_tokens=200,
    response_tokens=2500,
    problem_spread=0.25,
    member_spread=0.15,
    turn_spread=TURN_SPREAD,
    step=Latency(mean=0.5, sd=0.5),
    reset=Latency(mean=0.5, sd=0.2),
    score=Latency(mean=2.0, sd=1.0),
    runs_on=BANDWIDTH,
)
GAME = DomainWork(
    name="game",
    turns=(1, 1),
    prompt_tokens=500,
    response_tokens=4000,
    problem_spread=0.25,
    member_spread=0.15,
    turn_spread=TURN_SPREAD,
    step=Latency(mean=0.05),
    reset=Latency(mean=0.2),
    score=Latency(mean=0.1),
    runs_on=BANDWIDTH,
)
ALL = (SWE, WEBSHOP, FROZEN_LAKE, MATH, GAME)

TENSOR_PARALLEL = {"Qwen3-8B": 1, "Qwen3-14B": 2, "Qwen3-32B": 4, "Qwen3-30B-A3B": 2}


def h800(gpus: int, model: str = "Qwen3-8B", **more: Any) -> PoolSection:
    return PoolSection(
        hardware="H800", gpus=gpus, hardware_class=COMPUTE, tensor_parallel=TENSOR_PARALLEL[model], **more
    )


def h20(gpus: int, model: str = "Qwen3-8B", **more: Any) -> PoolSection:
    return PoolSection(
        hardware="H20", gpus=gpus, hardware_class=BANDWIDTH, tensor_parallel=TENSOR_PARALLEL[model], **more
    )


def change(scenario: Scenario, **more: Any) -> Scenario:
    """The same but for some fields, checked again."""
    return Scenario.model_validate({**dict(scenario), **more})


SWE_STEP = Scenario(
    domains=(SWE,),
    pools=(h800(32),),
    trainer=TrainerSection(gpus=32, colocated=True),
    weights=WeightsSection(mode="inline"),
    reward=RewardSection(),
    efficiency=FITTED,
    alpha=0,
    groups_per_step=16,
    mode="sync",
    steps=6,
    warmup=1,
)
"""The step that is published in its parts."""


BATCH = 512
"""Trajectories of a step, and environments: ROLL, on which the published systems are built, keeps one environment for
each trajectory of a batch (`num_env_groups` x `group_size`), whatever alpha is, and each belongs to one domain."""
ENVIRONMENTS = 104
"""Of each of the five domains: the fewest whole groups of 8 that hold its part of a batch."""


def chain(model: str, gpus: int = 128) -> dict[str, Scenario]:
    """The five systems on as many GPUs: a quarter trains. A batch of the baseline AReaL is one group of each
    environment's, as ROLL takes it; RollArt's is what is in its buffer."""
    base = Scenario(
        model=model,
        domains=tuple(d.model_copy(update={"environments": ENVIRONMENTS}) for d in ALL),
        pools=(h800(gpus * 3 // 4, model),),
        trainer=TrainerSection(gpus=gpus // 4),
        weights=WeightsSection(mode="inline"),
        efficiency=FITTED,
        alpha=0,
        mode="sync_plus",
        affinity=False,
        groups_per_step=64,
        max_concurrent=BATCH,
        steps=8,
        warmup=2,
    )
    asynchronous = {"alpha": 1, "steps": 14, "warmup": 6}  # what began first is short: that has to be over
    sync = change(base, mode="sync", reward=RewardSection(type="dedicated", slots=16))
    return {
        "Sync": sync,
        "Sync+": base,
        "One-off": change(base, **asynchronous, mode="one_off"),
        "AReaL": change(base, **asynchronous, mode="areal", batches="blocks"),
        "RollArt": change(
            base,
            **asynchronous,
            mode="rollart",
            affinity=True,
            weights=WeightsSection(mode="overlapped"),
            pools=(h800(gpus // 2, model), h20(gpus // 4, model)),
        ),
    }
