"""Held-out evaluation of the version that the engines serve.

Invariants: the same held-out problems in every run and at every version; sampled with fixed seeds; nothing of it
enters the sample buffer; a problem that fails for infrastructure reasons is reported as missing, never as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from statistics import fmean
from threading import Event

from distributed import Client
from prefect import task
from prefect.cache_policies import NO_CACHE

from flows.evaluations import Evaluation, Share, keep, load
from infra.compute.graphs import GroupGraph, Placements, Stages
from infra.compute.pools import slots
from infra.store.objects import ObjectStore
from infra.tracking.run import Tracker
from rl.config.run import RunConfig
from rl.config.work import EvaluationSection
from rl.errors import StageFailure, TooManyFailures
from rl.pass_at import mean_pass_at
from rl.trajectory import Problem, Uid
from tasks.admit import Played, collect
from tasks.interact import interact
from tasks.reset import reset
from tasks.score import score

STAGES = Stages(reset, interact, score, collect)
AT_ONCE = 128
PERIOD_S = 0.5


@task(task_run_name="evaluate {domain} v{version}", cache_policy=NO_CACHE, persist_result=False)
def evaluate_domain(
    domain: str, version: int, config: RunConfig, client: Client, run: str, look: Callable[[], None]
) -> Evaluation:
    """Play the held-out problems of a domain. `look` is called all the while; what it raises ends the plays.

    Raises TooManyFailures when most of them could not be played."""
    placements = Placements(STAGES, slots(client))
    problems = config.stream.held_out(domain, config.evaluation.problems)

    graphs: list[GroupGraph] = []
    ended = Event()

    def play(problem: Problem) -> Played | None:
        if ended.is_set():
            return None
        graph = GroupGraph(
            client,
            placements,
            run,
            Uid(problem.ordinal, 0),
            problem,
            version,
            config.evaluation.samples,
            config.rollout.member_retries,
            config.deadlines.trajectory,
        )
        graphs.append(graph)
        try:
            return graph.run()
        except StageFailure:
            return None

    with ThreadPoolExecutor(min(AT_ONCE, len(problems))) as threads:
        plays = [threads.submit(play, problem) for problem in problems]
        try:
            while wait(plays, PERIOD_S).not_done:
                look()
        except BaseException:
            ended.set()
            for graph in graphs:
                graph.cancel()
            raise
        played = [one for one in (done.result() for done in plays) if one is not None]
    if len(played) * 2 < len(problems):
        raise TooManyFailures(
            f"evaluation of {domain} at version {version}: only {len(played)} of {len(problems)} problems could be "
            "played"
        )
    return summarise(config.evaluation, version, domain, played, len(problems) - len(played))


def summarise(
    section: EvaluationSection, version: int, domain: str, played: Sequence[Played], missing: int
) -> Evaluation:
    """What was played, as figures; `played` has at least one problem."""

    def passes(some: Sequence[Played]) -> dict[str, float]:
        rewards = [p.rewards for p in some]
        return {str(k): mean_pass_at(k, rewards, section.solved_at) for k in section.pass_at}

    told = {p.difficulty for p in played if p.difficulty is not None}
    easiest_first = sorted(told, key=lambda d: (isinstance(d, str), 0.0 if isinstance(d, str) else d, str(d)))
    shares = {}
    for difficulty in easiest_first:
        some = [p for p in played if p.difficulty == difficulty]
        shares[str(difficulty)] = Share(len(some), fmean(r for p in some for r in p.rewards), passes(some))
    return Evaluation(
        version,
        domain,
        fmean(r for p in played for r in p.rewards),
        len(played),
        missing,
        fmean(t for p in played for t in p.turns),
        fmean(t for p in played for t in p.truncated),
        section.samples,
        passes(played),
        shares,
        section.temperature,
        section.solved_at,
    )


def evaluate(
    config: RunConfig, store: ObjectStore, client: Client, run: str, version: int, look: Callable[[], None]
) -> list[Evaluation]:
    """Evaluate every domain at `version`, which the engines must serve; kept in the store, so that a resumed
    run does not do it twice, and told to MLflow. `look` as for a domain."""
    if config.evaluation.problems == 0:
        return []
    if (kept := load(config, store, version)) is not None:
        return kept
    results = [evaluate_domain(d.name, version, config, client, run, look) for d in config.domains]
    keep(config, store, results)
    tracker = Tracker.start(config, "evaluator")
    tracker.log_step(version, {f"held_out_{r.domain}": r.reward for r in results})
    tracker.close(config.deadlines.control)
    return results
