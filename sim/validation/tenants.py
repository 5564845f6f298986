"""Predictions of the multi-tenant experiments: 32 tenants, each with its own adapter, on 64 NPUs.

Only what the paper's abstract says is public: the hardware, the models, the domains and the best of each figure. The
batch, the tokens of a turn and the latencies are chosen; the efficiency of training is fitted to the gain in
throughput.

Invariant: all systems are compared on the same tenants with the same work.
"""

from __future__ import annotations

from rl.placement import HardwareClass
from sim.cluster import Cluster
from sim.config import DomainWork, Efficiency, Latency, PoolSection, Scenario, TrainerSection
from sim.simulate import LONGEST
from sim.validation.workloads import change

TENANTS = 32
STEPS = 3
SEARCH = DomainWork(
    name="search",
    turns=(2, 6),
    prompt_tokens=300,
    observation_tokens=2000,
    response_tokens=700,
    problem_spread=0.3,
    member_spread=0.3,
    turn_spread=0.2,
    step=Latency(mean=2.0, sd=2.0),
    reset=Latency(mean=1.0, sd=0.5),
    score=Latency(mean=0.2),
)
SCENARIO = Scenario(
    name="tenants",
    model="Qwen3-14B",
    domains=(SEARCH,),
    pools=(
        PoolSection(
            hardware="Ascend910B", gpus=48, hardware_class=HardwareClass.BANDWIDTH_GPU, tensor_parallel=2,
            max_sequences=256,
        ),
    ),
    trainer=TrainerSection(hardware="Ascend910B", gpus=16),
    efficiency=Efficiency(
        iteration=0.015, train=0.21, train_fixed=2.0, train_passes=3.0, push_bandwidth=1e12, pull_bandwidth=1e12
    ),  # an adapter is small
    alpha=0,
    mode="sync_plus",
    groups_per_step=8,
    group_size=8,
    steps=STEPS,
    warmup=1,
)  # fmt: skip


def tenants() -> dict[str, float]:
    """One after another, all together in lockstep, and as the system does it."""
    shared = _cluster(TENANTS)
    alone = _cluster(1)
    update = alone.trainer_busy / STEPS
    per_hour = {"shared": TENANTS * STEPS / shared.now, "alone": STEPS / alone.now}
    first = max(run.steps[0].batch - run.steps[0].asked for run in shared.runs)
    per_hour["together"] = TENANTS / (first + TENANTS * update)
    used = {"shared": _computing(shared), "alone": _computing(alone)}
    idle = {"shared": _idle(shared), "alone": _idle(alone)}
    return {
        "tenants: steps per hour over one after another": per_hour["shared"] / per_hour["alone"],
        "tenants: utilisation over one after another": used["shared"] / used["alone"],
        "tenants: idle time": idle["shared"] / idle["alone"],
        "tenants: end-to-end time of 32": per_hour["alone"] / per_hour["shared"],
        "tenants: without asynchrony": per_hour["together"] / per_hour["shared"],
        "tenants: without a shared rollout, too": per_hour["alone"] / per_hour["shared"],
    }


def _cluster(count: int) -> Cluster:
    """So many tenants, each to its last step."""
    cluster = Cluster(change(SCENARIO, tenants=count), steps=STEPS)
    cluster.simulate(LONGEST)
    return cluster


def _computing(cluster: Cluster) -> float:
    """Share of the time of all NPUs in which they compute, and do not wait for a host."""
    engines, trainer = SCENARIO.pools[0], SCENARIO.trainer.gpus
    generating = cluster.world.totals.computing * engines.tensor_parallel
    return (generating + cluster.trainer_busy * trainer) / (cluster.now * (engines.gpus + trainer))


def _idle(cluster: Cluster) -> float:
    """Share of the time of all NPUs in which nothing was asked of them."""
    engines, trainer = SCENARIO.pools[0], SCENARIO.trainer.gpus
    generating = float(cluster.world.totals.busy.sum()) * engines.tensor_parallel
    return 1.0 - (generating + cluster.trainer_busy * trainer) / (cluster.now * (engines.gpus + trainer))
