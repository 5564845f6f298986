"""Held-out evaluation of the version that the engines serve.

Invariants: the same held-out problems in every run and at every version; sampled with fixed seeds; nothing of it
enters the sample buffer; a problem that fails for infrastructure reasons is reported as missing, never as 0.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from statistics import fmean

from distributed import Client
from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.compute.graphs import GroupGraph, Placements, Stages
from infra.compute.pools import slots
from infra.store.objects import ObjectStore
from rl.config.run import RunConfig
from rl.errors import StageFailure, TooManyFailures
from rl.trajectory import Problem, Uid
from tasks.admit import Sealed, collect
from tasks.interact import interact
from tasks.reset import reset
from tasks.score import score

STAGES = Stages(reset, interact, score, collect)
AT_ONCE = 128


@dataclass(frozen=True)
class Evaluation:
    """Mean reward of one domain at one version."""

    version: int
    domain: str
    reward: float
    problems: int
    missing: int
    turns: float
    """Mean turns per problem."""
    truncated: float
    """Share of episodes that a limit ended."""

    def __str__(self) -> str:
        missing = f", {self.missing} missing" if self.missing else ""
        return (
            f"held-out {self.domain} at version {self.version}: reward {self.reward:.3f} over {self.problems} "
            f"problems{missing}, {self.turns:.1f} turns"
        )


@task(task_run_name="evaluate {domain} v{version}", cache_policy=NO_CACHE, persist_result=False)
def evaluate_domain(domain: str, version: int, config: RunConfig, client: Client, run: str) -> Evaluation:
    """Play the held-out problems of a domain. Raises TooManyFailures when most of them could not be played."""
    placements = Placements(STAGES, slots(client))
    problems = config.stream.held_out(domain, config.evaluation.problems)

    def play(problem: Problem) -> Sealed | None:
        graph = GroupGraph(
            client,
            placements,
            run,
            Uid(problem.ordinal, 0),
            problem,
            version,
            1,
            config.rollout.member_retries,
            config.deadlines.trajectory,
        )
        try:
            return graph.run()
        except StageFailure:
            return None

    with ThreadPoolExecutor(min(AT_ONCE, len(problems))) as threads:
        played = [sealed for sealed in threads.map(play, problems) if sealed is not None]
    if len(played) * 2 < len(problems):
        raise TooManyFailures(
            f"evaluation of {domain} at version {version}: only {len(played)} of {len(problems)} problems could be "
            "played"
        )
    return Evaluation(
        version,
        domain,
        fmean(s.rewards[0] for s in played),
        len(played),
        len(problems) - len(played),
        fmean(s.turns for s in played),
        fmean(s.truncated for s in played),
    )


def evaluate(config: RunConfig, store: ObjectStore, client: Client, run: str, version: int) -> list[Evaluation]:
    """Evaluate every domain at `version`, which the engines must serve; kept in the store, so that a resumed
    run does not do it twice."""
    if config.evaluation.problems == 0:
        return []
    key = _key(config, version)
    if store.exists(key):
        return load(config, store, version)
    results = [evaluate_domain(d.name, version, config, client, run) for d in config.domains]
    store.put(key, json.dumps([asdict(r) for r in results]).encode())
    return results


def load(config: RunConfig, store: ObjectStore, version: int) -> list[Evaluation]:
    """A kept evaluation."""
    return [Evaluation(**row) for row in json.loads(store.get(_key(config, version)))]


def load_all(config: RunConfig, store: ObjectStore) -> list[Evaluation]:
    """Every kept evaluation of the run, by version."""
    keys = sorted(store.keys(f"{config.prefix}evaluations/"))
    return [Evaluation(**row) for key in keys for row in json.loads(store.get(key))]


def _key(config: RunConfig, version: int) -> str:
    return f"{config.prefix}evaluations/{version:010d}.json"
