"""Runs a scenario and says what came of it.

Invariants: the same scenario gives the same result, bit by bit, on one machine; what is measured begins at the commit
of version `warmup` and ends at the last commit, so that neither the start nor an unfinished step counts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from rl.errors import RollmillError
from sim.cluster import Cluster
from sim.config import Scenario
from sim.host import StepTimes
from sim.profiles import hardware
from sim.workload import Workload

LONGEST = 4e6
"""Seconds of the virtual clock after which a scenario without a horizon is given up."""


class NoProgress(RollmillError):
    """A scenario made too few steps to say anything about it."""


@dataclass(frozen=True)
class Result:
    """Rates and shares over the measured time. Shares are of that time; costs in hours of one H20."""

    step_s: float
    """Mean time from one commit to the next, of whichever run."""
    tokens_per_s: float
    """Trained, prompts and responses."""
    trajectories_per_s: float
    rollout_s: float
    """Mean time in which the trainer was ready for a batch and had none."""
    train_s: float
    """Mean time of a step's computation."""
    trainer_idle: float
    engine_idle: float
    """Share of the engines' time, since the beginning, in which they neither read nor decode."""
    stalled: float
    """Share of the time, since the beginning, in which engines stood still for an update."""
    reward_utilisation: float
    """Of dedicated reward slots; 1 for functions."""
    lag: float
    """Mean over the trained groups, in versions."""
    wasted: float
    """Trajectories that were ended before they were through, over those that were started."""
    cost: float
    """Of a million trained trajectories."""
    steps: tuple[StepTimes, ...] = field(default=(), repr=False)
    """Of the first run."""
    durations: tuple[float, ...] = field(default=(), repr=False)
    """Of the groups, from start to end."""

    def figures(self) -> dict[str, float]:
        """The numbers, by name."""
        found: dict[str, Any] = asdict(self)
        return {name: value for name, value in found.items() if isinstance(value, float)}


def simulate(scenario: Scenario, work: Workload | None = None) -> Result:
    """One run on the scenario's cluster, of the work that its domains describe, or of `work`. Raises NoProgress when
    the horizon came before a measured step did."""
    steps = None if scenario.horizon is not None else scenario.steps
    cluster = Cluster(scenario, steps, work)
    cluster.simulate(scenario.horizon or LONGEST)
    return result(cluster)


def result(cluster: Cluster) -> Result:
    """What came of a cluster that was simulated, all its runs together."""
    scenario, world = cluster.scenario, cluster.world
    made = [run.steps for run in cluster.runs]
    begin = max(
        (steps[scenario.warmup - 1].committed for steps in made if len(steps) >= scenario.warmup > 0), default=0.0
    )
    measured = [step for steps in made for step in steps[scenario.warmup :] if step.committed > begin]
    if not measured:
        raise NoProgress(
            f"scenario {scenario.name!r}: {sum(map(len, made))} steps in {world.now:.0f} s, none after the warm-up of "
            f"{scenario.warmup}; give it more time or more GPUs"
        )
    seconds = max(step.committed for step in measured) - begin
    trajectories = sum(step.trajectories for step in measured)
    per_second = trajectories / seconds
    totals = world.totals
    started = totals.finished + totals.ended + totals.failed
    wait = fmean(step.batch - step.asked for step in measured)
    return Result(
        step_s=seconds / len(measured),
        tokens_per_s=sum(step.tokens for step in measured) / seconds,
        trajectories_per_s=per_second,
        rollout_s=wait,
        train_s=fmean(step.trained - step.batch for step in measured),
        trainer_idle=max(0.0, 1.0 - cluster.trainer_busy / world.now),
        engine_idle=max(0.0, 1.0 - float(totals.busy.sum()) / (len(totals.busy) * world.now)),
        stalled=totals.stalled / world.now,
        reward_utilisation=world.rewards.utilisation(world.now),
        lag=fmean(step.lag for step in measured),
        wasted=totals.ended / max(1, started),
        cost=hourly_price(scenario) / 3600 / per_second * 1e6,
        steps=tuple(cluster.runs[0].steps),
        durations=tuple(took for run in cluster.runs for took in run.durations),
    )


def hourly_price(scenario: Scenario) -> float:
    """Of all GPUs of a scenario, in units of one H20."""
    trainer = 0.0 if scenario.trainer.colocated else scenario.trainer.gpus * hardware(scenario.trainer.hardware).price
    engines = sum(pool.gpus * hardware(pool.hardware).price for pool in scenario.pools)
    return trainer + engines + scenario.reward.gpus * hardware(scenario.reward.hardware).price
