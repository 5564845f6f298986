"""Predictions of the published comparisons of whole systems, on mixed work and up to 128 GPUs and a whole cluster.

Invariant: every function gives its predictions by the names of `rows`, from the workloads alone. Of a number that is
published as a range over models the prediction farthest from the range is given: all models have to lie within.
"""

from __future__ import annotations

from collections.abc import Mapping

from sim.config import Efficiency, Latency, PoolSection, Scenario, TrainerSection
from sim.simulate import Result, simulate
from sim.validation.rows import ROWS
from sim.validation.workloads import (
    BANDWIDTH,
    COMPUTE,
    FROZEN_LAKE,
    GAME,
    MATH,
    SWE,
    WEBSHOP,
    chain,
    change,
    h20,
    h800,
)  # fmt: skip

MODELS = ("Qwen3-8B", "Qwen3-14B", "Qwen3-32B")
CHAIN = ("Sync", "Sync+", "One-off", "AReaL", "RollArt")
_ROWS = {row.name: row for row in ROWS}


def whole_chain() -> dict[str, float]:
    """Sync, Sync+, One-off, AReaL and RollArt, on 8B to 32B."""
    by_model = {model: {name: simulate(scenario) for name, scenario in chain(model).items()} for model in MODELS}
    pairs = [*zip(CHAIN[1:], CHAIN, strict=False), ("RollArt", "Sync")]
    found = {
        f"{fast} over {slow}": _farthest(
            f"{fast} over {slow}", {m: r[fast].tokens_per_s / r[slow].tokens_per_s for m, r in by_model.items()}
        )
        for fast, slow in pairs
    }
    return found | step_times(by_model["Qwen3-32B"]) | _overlap(by_model)


def step_times(results: Mapping[str, Result]) -> dict[str, float]:
    """Ratios of the step times of 32B."""

    def ratio(slow: str, fast: str) -> float:
        return results[slow].step_s / results[fast].step_s

    pairs = (("Sync+", "RollArt"), ("One-off", "RollArt"), ("AReaL", "RollArt"), ("Sync+", "One-off"))
    return {f"32B: {slow} over {fast}": ratio(slow, fast) for slow, fast in pairs}


def _overlap(by_model: Mapping[str, Mapping[str, Result]]) -> dict[str, float]:
    """RollArt with weights that stop everything, over RollArt."""
    name = "step with inline over overlapped weights"
    inline = {m: simulate(change(chain(m)["RollArt"], weights=chain(m)["AReaL"].weights)) for m in MODELS}
    return {name: _farthest(name, {m: inline[m].step_s / by_model[m]["RollArt"].step_s for m in MODELS})}


def scaling() -> dict[str, float]:
    """14B on 128 GPUs over 64."""
    small, large = (simulate(chain("Qwen3-14B", gpus)["RollArt"]) for gpus in (64, 128))
    return {"14B: 128 over 64 GPUs": large.tokens_per_s / small.tokens_per_s}


def mixes() -> dict[str, float]:
    """Rollout hardware of about equal price, with a trainer that is never in the way."""
    speed: dict[str, dict[str, float]] = {"mixed": {}, "H800": {}, "H20": {}}
    for model in MODELS:
        base = change(chain(model)["RollArt"], trainer=TrainerSection(gpus=256))
        for name, pools in (
            ("mixed", (h800(64, model), h20(24, model))), ("H800", (h800(72, model),)), ("H20", (h20(208, model),)),
        ):  # fmt: skip
            speed[name][model] = simulate(change(base, pools=pools)).tokens_per_s
    names = {"64 H800 + 24 H20 over 72 H800": "H800", "64 H800 + 24 H20 over 208 H20": "H20"}
    return {
        name: _farthest(name, {m: speed["mixed"][m] / speed[other][m] for m in MODELS}) for name, other in names.items()
    }


def bounds() -> dict[str, float]:
    """Step time under alpha 1 over that under 2, 4 and 6: the most over the models."""
    best: dict[int, float] = dict.fromkeys((2, 4, 6), 0.0)
    for model in MODELS:
        base = change(chain(model)["RollArt"], steps=20, warmup=8)
        one = simulate(base).step_s
        for alpha in best:
            best[alpha] = max(best[alpha], one / simulate(change(base, alpha=alpha)).step_s)
    return {f"alpha {alpha} over 1": ratio for alpha, ratio in best.items()}


WEEK = 7 * 24 * 3600.0
AT_ONCE, TICK = 4, 15.0


def week(horizon: float = WEEK) -> Scenario:
    """3,000 GPUs, a sixth of them training, alpha 1: a mixture of 235B parameters on agentic work. What is public is
    the size, the split and alpha; model, work and latencies are chosen."""
    slower = {"response_tokens": 600.0, "reset": Latency(mean=20.0, sd=20.0, tail_share=0.001, tail_mean=200.0)}
    swe = SWE.model_copy(update=slower | {"step": Latency(mean=8.0, sd=8.0), "weight": 2.0, "failure": 0.02,
                                          "score": Latency(mean=20.0, sd=10.0)})  # fmt: skip
    shop = WEBSHOP.model_copy(update=slower | {"step": Latency(mean=8.0, sd=5.0)})
    lake = FROZEN_LAKE.model_copy(update={"response_tokens": 250.0, "step": Latency(mean=8.0, sd=2.0)})
    math = MATH.model_copy(update={"response_tokens": 6000.0})
    wide = {"tensor_parallel": 8, "max_sequences": 64}
    return Scenario(
        name="week",
        model="Qwen3-235B-A22B",
        domains=(swe, shop, lake, math, GAME),
        pools=(
            PoolSection(hardware="H800", gpus=1752, hardware_class=COMPUTE, **wide),
            PoolSection(hardware="H20", gpus=752, hardware_class=BANDWIDTH, **wide),
        ),
        trainer=TrainerSection(gpus=496),
        efficiency=Efficiency(iteration=0.004, train=0.193, train_fixed=40.0, push_bandwidth=10e9, pull_bandwidth=50e9),
        alpha=1,
        groups_per_step=640,
        horizon=horizon,
        turns_at_once=AT_ONCE,
        tick=TICK,
    )


def production() -> dict[str, float]:
    """The share of a step in which the trainer waits for its batch; six hours of the week."""
    result = simulate(week(6 * 3600.0))
    return {"production: waiting for a batch": result.rollout_s / result.step_s}


def _farthest(name: str, by_model: Mapping[str, float]) -> float:
    """The prediction that is off the most."""
    row = _ROWS[name]
    return max(by_model.values(), key=lambda value: (abs(row.error(value)), value))
