"""Predictions of the published experiments on single parts: one step, hardware, rewards, weights, redundancy, split.

Invariant: every function gives its predictions by the names of `rows`, from the workloads alone.
"""

from __future__ import annotations

from rl.placement import HardwareClass
from sim.config import DomainWork, Latency, PoolSection, Redundancy, RewardSection, Scenario, TrainerSection
from sim.profiles import language_model
from sim.simulate import Result, simulate
from sim.validation.workloads import (
    FITTED,
    FROZEN_LAKE,
    MATH,
    SWE,
    SWE_STEP,
    TENSOR_PARALLEL,
    TURN_SPREAD,
    change,
    h20,
    h800,
)  # fmt: skip
from sim.weights import weight_times

NOTHING = Latency(mean=0.0)
SIZES = {"8B": "Qwen3-8B", "14B": "Qwen3-14B", "32B": "Qwen3-32B"}


def swe_step() -> dict[str, float]:
    """One synchronous step, by parts: each part is what the rollout is shorter by without it."""
    whole = simulate(SWE_STEP)
    instant = simulate(_with(SWE_STEP, SWE, reset=NOTHING))
    alone = simulate(_with(SWE_STEP, SWE, reset=NOTHING, step=NOTHING, score=NOTHING))
    single = simulate(change(SWE_STEP, mode="sync_plus"))
    # About one step in ten meets an environment that hangs: one reset in 1,200, for minutes.
    broken = [simulate(change(_with(SWE_STEP, SWE, reset=_hanging()), seed=seed)) for seed in (1, 2)]
    slow = max((s.batch - s.asked for r in broken for s in r.steps), default=0.0)
    return {
        "swe step": whole.step_s,
        "swe generation share": alone.rollout_s / whole.step_s,
        "swe training share": whole.train_s / whole.step_s,
        "swe reset share": (whole.rollout_s - instant.rollout_s) / whole.step_s,
        "swe step with failures": slow + whole.train_s,
        "lockstep over trajectory-wise rollout": whole.rollout_s / single.rollout_s,
    }


def _hanging() -> Latency:
    return SWE.reset.model_copy(update={"tail_share": 1 / 400, "tail_mean": 110.0})


def affinity() -> dict[str, float]:
    """2 H800 against 6 H20: the time to generate a batch; over batches of 64 to 192 for math."""
    lake = _generation(FROZEN_LAKE, h800(2), 16) / _generation(FROZEN_LAKE, h20(6), 16)
    math = [_generation(MATH, h20(6), groups) / _generation(MATH, h800(2), groups) for groups in (8, 24)]
    return {"frozen lake: H800 over H20": lake, "math: H20 over H800": sum(math) / len(math)}


def _generation(domain: DomainWork, pool: PoolSection, groups: int) -> float:
    """Seconds to roll a batch out, by engines of one pool alone."""
    one = change(SWE_STEP, domains=(domain,), pools=(pool,), groups_per_step=groups, mode="sync_plus",
                 steps=2, warmup=0)  # fmt: skip
    return simulate(one).rollout_s


def rewards() -> dict[str, float]:
    """A judge on half of 8 GPUs against functions, with all 8 for generation."""
    judged = MATH.model_copy(update={"score": Latency(mean=0.235, sd=0.1)})
    base = change(SWE_STEP, domains=(judged,), groups_per_step=128, mode="sync_plus", steps=3, warmup=0)
    own = RewardSection(type="dedicated", slots=4, gpus=4)
    dedicated = simulate(change(base, pools=(h800(4),), reward=own))
    functions = simulate(change(base, pools=(h800(8),)))
    busy = dedicated.reward_utilisation * dedicated.step_s / max(dedicated.rollout_s, 1e-9)
    return {
        "dedicated reward utilisation": busy,
        "step with dedicated over serverless rewards": dedicated.rollout_s / functions.rollout_s,
    }


def weights() -> dict[str, float]:
    """Seconds of each way, by model."""
    found: dict[str, float] = {}
    for size, name in SIZES.items():
        times = weight_times(language_model(name), FITTED)
        found |= {
            f"tcp {size}": times.tcp, f"rdma {size}": times.rdma, f"push {size}": times.push,
            f"exposed pull {size}": times.exposed_pull, f"inline {size}": times.inline,
        }  # fmt: skip
    return found


def latency_spread() -> dict[str, float]:
    """Lockstep over trajectory-wise rollout, when a turn of the environment takes 10 s more or less."""
    found: dict[str, float] = {}
    for sigma in (1, 3, 5, 7, 10):
        slow = DomainWork(
            name="slow", turns=(18, 22), response_tokens=150, problem_spread=0.05, member_spread=0.1,
            turn_spread=TURN_SPREAD, step=Latency(mean=10.0, sd=sigma, shape="normal"), reset=Latency(mean=1.0, sd=0.5),
        )  # fmt: skip
        base = change(SWE_STEP, domains=(slow,), steps=2, warmup=0)
        apart = simulate(change(base, mode="sync_plus"))
        found[f"sigma {sigma}"] = simulate(base).rollout_s / apart.rollout_s
    return found


def redundancy() -> dict[str, float]:
    """Time to 32 complete groups of 8, over that without anything extra; `first_finished`."""
    base = change(SWE_STEP, domains=(MATH,), groups_per_step=32, mode="sync_plus", steps=8, warmup=0)
    found: dict[tuple[int, int], Result] = {}
    for members in (8, 10, 12):
        for groups in (32, 34, 36):
            extra = Redundancy(mode="first_finished", extra_groups=groups - 32, extra_members=members - 8)
            found[members, groups] = simulate(change(base, redundancy=extra))
    alone = found[8, 32].rollout_s
    return {f"redundancy {m} x {g}": alone / r.rollout_s for (m, g), r in found.items() if (m, g) != (8, 32)}


def prefill_decode() -> dict[str, float]:
    """Step time with prompts read by H800 nodes and answers decoded by H20 nodes, and with the same nodes undivided."""
    found: dict[str, float] = {}
    for name, model in (("32B", "Qwen3-32B"), ("30B-A3B", "Qwen3-30B-A3B")):
        for p, d in ((1, 3), (2, 2)):
            split = simulate(_nodes(model, p, d, "prefill", "decode")).step_s
            whole = simulate(_nodes(model, p, d, "both", "both")).step_s
            found[f"{name} {p}P{d}D"] = split / whole
            if name == "32B":
                found |= {f"32B undivided, {p} H800 + {d} H20 nodes": whole, f"32B divided, {p}P{d}D": split}
    return found


def _nodes(model: str, p: int, d: int, first: str, second: str) -> Scenario:
    wide = TENSOR_PARALLEL[model]
    pools = tuple(
        PoolSection(hardware=h, gpus=8 * n, tensor_parallel=wide, hardware_class=c, role=role)
        for h, n, c, role in (
            ("H800", p, HardwareClass.COMPUTE_GPU, first), ("H20", d, HardwareClass.BANDWIDTH_GPU, second),
        )
    )  # fmt: skip
    return change(SWE_STEP, model=model, pools=pools, trainer=TrainerSection(gpus=32), affinity=False,
                  mode="sync_plus", steps=3)  # fmt: skip


def _with(scenario: Scenario, domain: DomainWork, **more: object) -> Scenario:
    return change(scenario, domains=(domain.model_copy(update=more),))
