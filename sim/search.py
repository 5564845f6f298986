"""Looks for the best plan: staleness bound, spares and mix of hardware, for a given amount of money or GPUs.

One thing is changed at a time, starting from the scenario as it is, until no change helps (coordinate descent): the
plans of a cluster are a small space, and every plan is simulated at most once.

Invariants: deterministic; all plans are measured over as many steps, from where the largest bound has settled;
nothing is proposed that costs more per hour than the budget, nor redundancy that prefers short trajectories, unless the
search is told that this is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from rl.config.base import Section
from rl.errors import ConfigError
from sim.config import Redundancy, Scenario
from sim.profiles import hardware
from sim.simulate import NoProgress, Result, hourly_price, simulate


class SearchSection(Section):
    """What may be changed."""

    objective: Literal["throughput", "cost"] = "cost"
    """Tokens per second within the budget, or the price of a million trajectories."""
    budget: Annotated[float, Field(gt=0)] | None = None
    """Price per hour of all GPUs, in H20; None is what the scenario costs."""
    alphas: tuple[int, ...] = (1, 2, 4)
    """Bounds to try; in a mode that takes only one, that one."""
    spares: tuple[int, ...] = (0, 1)
    """Members started beyond the group's size to try. They replace failures only."""
    move_gpus: bool = True
    """Whether pools, and pools and the trainer, may exchange GPUs for those of equal price."""
    rounds: Annotated[int, Field(ge=1)] = 4
    """Most rounds of changes."""


SETTLE = 3
"""Steps beyond the largest bound before the measuring begins."""


@dataclass(frozen=True)
class Plan:
    """A scenario and what it does."""

    scenario: Scenario
    result: Result

    @property
    def label(self) -> str:
        s = self.scenario
        pools = " + ".join(f"{pool.gpus} {pool.hardware}" for pool in s.pools)
        spares = f", {s.redundancy.extra_members} spare" if s.redundancy.extra_members else ""
        return f"alpha {s.alpha}{spares}, {pools}, trainer {s.trainer.gpus} {s.trainer.hardware}"


def search(scenario: Scenario, section: SearchSection) -> list[Plan]:
    """Every plan that was tried, best first. Raises NoProgress when the scenario itself makes no steps."""
    budget = section.budget if section.budget is not None else hourly_price(scenario)
    if hourly_price(scenario) > budget * 1.001:
        raise ConfigError(
            f"search.budget ({budget:g}) is below the price of the scenario itself ({hourly_price(scenario):g} per "
            "hour, in H20); raise it, or take GPUs away"
        )
    settled = max([scenario.alpha, *section.alphas]) + SETTLE

    def plan(one: Scenario) -> Plan:
        return Plan(one, simulate(_lengthened(one, settled)))

    tried = {scenario.model_dump_json(): plan(scenario)}
    best = next(iter(tried.values()))
    for _ in range(section.rounds):
        before = best
        for change in _changes(best.scenario, section):
            key = change.model_dump_json()
            if key in tried or hourly_price(change) > budget * 1.001:
                continue
            try:
                found = tried[key] = plan(change)
            except NoProgress:
                continue
            if score(found, section) > score(best, section):
                best = found
        if best is before:
            break
    return sorted(tried.values(), key=lambda plan: -score(plan, section))


def _lengthened(scenario: Scenario, warmup: int) -> Scenario:
    """The scenario, with as many measured steps, after so many at least: under a larger bound the first batches are
    made of what is short, and only then it goes on as it will."""
    if scenario.horizon is not None or scenario.warmup >= warmup:
        return scenario
    return scenario.model_copy(update={"warmup": warmup, "steps": scenario.steps - scenario.warmup + warmup})


def score(plan: Plan, section: SearchSection) -> float:
    """What is to be as large as possible."""
    return plan.result.tokens_per_s if section.objective == "throughput" else -plan.result.cost


def _changes(scenario: Scenario, section: SearchSection) -> Iterator[Scenario]:
    """The plans next to this one, as far as they are possible."""
    for alpha in section.alphas:
        yield from _with(scenario, alpha=alpha)
    if scenario.redundancy.mode == "replace_failures":
        for spares in section.spares:
            yield from _with(scenario, redundancy=Redundancy(extra_members=spares))
    if not section.move_gpus:
        return
    for one, other in pairwise(range(len(scenario.pools))):
        for source, target in ((one, other), (other, one)):
            yield from _moved(scenario, source, target)
    if not scenario.trainer.colocated:
        for at in range(len(scenario.pools)):
            yield from _traded(scenario, at)


def _moved(scenario: Scenario, source: int, target: int) -> Iterator[Scenario]:
    """A quarter of a pool's GPUs exchanged for those of another pool, at their price."""
    pools = list(scenario.pools)
    gives, takes = pools[source], pools[target]
    away = _whole(gives.gpus / 4, gives.tensor_parallel)
    worth = away * hardware(gives.hardware).price / hardware(takes.hardware).price
    more = int(worth // takes.tensor_parallel) * takes.tensor_parallel
    if gives.gpus - away < gives.tensor_parallel or more < 1:
        return
    pools[source] = gives.model_copy(update={"gpus": gives.gpus - away})
    pools[target] = takes.model_copy(update={"gpus": takes.gpus + more})
    yield from _with(scenario, pools=tuple(pools))


def _traded(scenario: Scenario, at: int) -> Iterator[Scenario]:
    """A quarter of the trainer's GPUs for a pool, and the other way round, at their price."""
    pools, trainer = list(scenario.pools), scenario.trainer
    pool = pools[at]
    rate = hardware(trainer.hardware).price / hardware(pool.hardware).price
    moved = max(1, trainer.gpus // 4)
    gained = int(moved * rate // pool.tensor_parallel) * pool.tensor_parallel
    if trainer.gpus > moved and gained >= 1:
        pools[at] = pool.model_copy(update={"gpus": pool.gpus + gained})
        less = trainer.model_copy(update={"gpus": trainer.gpus - moved})
        yield from _with(scenario, pools=tuple(pools), trainer=less)
    lost = _whole(moved * rate, pool.tensor_parallel)
    if pool.gpus > lost:
        pools[at] = pool.model_copy(update={"gpus": pool.gpus - lost})
        more = trainer.model_copy(update={"gpus": trainer.gpus + moved})
        yield from _with(scenario, pools=tuple(pools), trainer=more)


def _whole(gpus: float, parallel: int) -> int:
    """Whole engines that take up at least so many GPUs."""
    return max(1, -(-int(gpus) // parallel)) * parallel


def _with(scenario: Scenario, **more: object) -> Iterator[Scenario]:
    try:
        yield Scenario.model_validate({**dict(scenario), **more})
    except ValidationError:
        return  # the mode takes no such alpha
