"""An episode that an agent plays by itself, through a session of the proxy.

Invariants
- The trajectory is the branch of the session that is trained (`rl.sessions.chosen`): the tokens that were sampled for
  the agent, with the versions and log-probs of the moment.
- A trajectory that grew stale or was cancelled ends so, whatever the agent says. What the agent raises is a failure,
  unless it was denied a turn because the policy had used up its turns or tokens: then the episode is truncated, with
  no reward of the environment.
- The session is closed on every way out.
"""

from __future__ import annotations

from contextlib import suppress
from time import time

from envs.agents import AgentEnvironment, ClientInfo, Outcome, unlike_an_outcome
from envs.calls import Overdue, bounded
from envs.injection import Injected
from infra.proxy.client import TrajectoryCancelled
from infra.proxy.session_wire import SessionBody, SessionRecord
from rl.errors import (
    EnvironmentFailure,
    EnvironmentProtocolError,
    EnvironmentTimeout,
    GenerationFailure,
    InjectedFailure,
    RollmillError,
    StageFailure,
    StaleTrajectory,
)
from rl.sessions import Turn, branches, chosen, columns, drifts, transcript
from rl.stream import derive_seed
from rl.trajectory import Span, Status, Trajectory
from tasks.environments import Live
from tasks.reset import Member
from tasks.runtime import Runtime

CLOSE_S = 60.0
"""To close a session; also how much longer than its trajectory it lives."""
ABANDON_S = 5.0
"""To close the session of an episode that was cancelled."""


def agent_of(live: Live) -> AgentEnvironment | None:
    """The agent that plays by itself, if this is one."""
    environment = live.environment
    within = environment.within if isinstance(environment, Injected) else environment
    return within if isinstance(within, AgentEnvironment) else None


async def play_agent(here: Runtime, member: Member, live: Live, agent: AgentEnvironment) -> Trajectory:
    """Play the episode. Raises StaleTrajectory, GenerationFailure, EnvironmentFailure, EnvironmentTimeout."""
    start = time()
    opened = await here.proxy.open_session(_body(here, member), here.config.deadlines.generate)
    client = ClientInfo(opened.base_url, opened.token, opened.model)
    try:
        ended = await _run(here, live, agent, client)
    except BaseException:
        with suppress(RollmillError):
            await here.proxy.close_session(opened, ABANDON_S)
        raise
    record = await here.proxy.close_session(opened, CLOSE_S)
    outcome = _outcome(member, record, ended)
    branch = chosen(record.turns)
    row = columns(branch)
    cut = record.limit is not None or branch[-1].finish_reason == "length"
    return Trajectory(
        uid=member.uid,
        member=member.member,
        problem=member.problem,
        start_version=member.version,
        prompt_length=len(branch[0].prompt),
        token_ids=row.token_ids,
        loss_mask=row.loss_mask,
        logprobs=row.logprobs,
        versions=row.versions,
        messages=transcript(branch),
        status=Status.TRUNCATED if cut else Status.TERMINATED,
        turns=len(branch),
        retry=member.retry,
        environment_reward=float(outcome.reward or 0.0),
        info=dict(outcome.info) | _beside(record, branch),
        spans=[*member.spans, *_spans(start, record.turns, time()), *live.injected],
    )


def _body(here: Runtime, member: Member) -> SessionBody:
    config, problem = here.config, member.problem
    evaluation = problem.split == "heldout"
    seed = None
    if config.deterministic or evaluation:
        seed = derive_seed(config.seed, problem.seed, member.uid, member.member, member.retry)
    return SessionBody(
        trajectory=member.key,
        tenant=config.served_as,
        domain=problem.domain,
        start_version=member.version,
        evaluation=evaluation,
        temperature=config.evaluation.temperature if evaluation else config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        max_tokens=config.rollout.max_tokens,
        max_turns=config.domain(problem.domain).max_turns,
        seed=seed,
        deadline_s=config.deadlines.trajectory + CLOSE_S,
    )


async def _run(here: Runtime, live: Live, agent: AgentEnvironment, client: ClientInfo) -> object:
    """What the agent gave, or the failure that it ended in. Raises InjectedFailure."""
    problem, deadline_s = live.problem, here.config.deadlines.trajectory
    which = f"{problem.domain}: the agent"
    if isinstance(live.environment, Injected):
        await live.environment.disturb()
    try:
        return await bounded(agent.run(problem, client), deadline_s)
    except InjectedFailure:
        raise
    except Overdue:
        return EnvironmentTimeout(f"{which} took longer than deadlines.trajectory ({deadline_s:g} s)")
    except Exception as error:
        failure = EnvironmentFailure(f"{which} raised {error!r} (problem seed {problem.seed})")
        failure.__cause__ = error
        return failure


def _outcome(member: Member, record: SessionRecord, ended: object) -> Outcome:
    """What came of the episode. Raises what made it one that does not count."""
    if record.ended == "stale":
        raise StaleTrajectory(f"trajectory {member.key} grew too old while its agent ran")
    if record.ended is not None:
        raise TrajectoryCancelled(f"trajectory {member.key}: {record.ended}")
    if isinstance(ended, EnvironmentFailure) and record.trouble is not None:
        raise GenerationFailure(f"trajectory {member.key}: {record.trouble}") from ended
    if not record.turns:
        raise ended if isinstance(ended, StageFailure) else EnvironmentFailure(
            f"{member.problem.domain}: the agent ended without a turn of the policy"
        )
    if isinstance(ended, EnvironmentFailure) and record.limit is not None:
        return Outcome(info={"denied": record.limit})
    if isinstance(ended, StageFailure):
        raise ended
    if mistake := unlike_an_outcome(ended):
        raise EnvironmentProtocolError(f"{member.problem.domain}: the agent gave {mistake}")
    return ended if isinstance(ended, Outcome) else Outcome(ended)  # type: ignore[arg-type]  # looked at above


def _beside(record: SessionRecord, branch: list[Turn]) -> dict[str, object]:
    """What the trajectory does not hold, if there is any."""
    if len(branch) == len(record.turns):
        return {}
    left_out = sum(len(t.token_ids) for t in record.turns) - sum(len(t.token_ids) for t in branch)
    return {
        "session": {
            "branches": len(branches(record.turns)),
            "untrained_tokens": left_out,
            "drift": drifts(record.turns),
        }
    }


def _spans(start: float, turns: list[Turn], end: float) -> list[Span]:
    """Generations, and between them what the agent did itself."""
    spans, at = [], start
    for turn in sorted(turns, key=lambda turn: turn.start):
        if turn.start > at:
            spans.append(Span("environment", at, turn.start))
        spans.append(Span("generate", turn.start, turn.end))
        at = max(at, turn.end)
    return [*spans, Span("environment", at, max(at, end))]
