"""Small clusters."""

from __future__ import annotations

from typing import Any

from rl.placement import HardwareClass
from sim.config import DomainWork, Latency, PoolSection, Scenario, TrainerSection

STEADY = DomainWork(
    name="steady",
    turns=(4, 4),
    response_tokens=100,
    problem_spread=0,
    member_spread=0,
    turn_spread=0,
    reset=Latency(mean=2.0),
    step=Latency(mean=3.0),
    score=Latency(mean=1.0),
)
VARIED = DomainWork(
    name="varied",
    turns=(2, 6),
    response_tokens=150,
    reset=Latency(mean=2.0, sd=2.0),
    step=Latency(mean=2.0, sd=2.0, tail_share=0.02, tail_mean=20.0),
    score=Latency(mean=0.5, sd=0.2),
)


def scenario(domain: DomainWork = VARIED, **more: Any) -> Scenario:
    """Two engines, two GPUs that train, 4 groups of 4."""
    base: dict[str, Any] = {
        "domains": (domain,),
        "pools": (PoolSection(hardware="H800", gpus=2, hardware_class=HardwareClass.COMPUTE_GPU),),
        "trainer": TrainerSection(gpus=2),
        "groups_per_step": 4,
        "group_size": 4,
        "steps": 8,
        "warmup": 2,
    }
    return Scenario.model_validate(base | more)
