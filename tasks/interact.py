"""Stage interact: the turns of one trajectory, between the LLM proxy and the environment.

Invariants
- Token-exact: what is sent is what was recorded plus the new observation; nothing is tokenised twice.
- A token that the model sampled has mask 1 with its version and log-prob; every other token has mask 0.
- A stale or cancelled trajectory ends at its next turn: the proxy refuses it (RollArt: checked every turn).
- The environment is closed on every way out.
- `info` is what the environment said last, under `mistakes` how many actions were mistakes of which kind, and under
  `difficulty` how hard the problem is, if the environment tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from time import time
from typing import Any

from infra.engines.protocol import Generation, Sampling
from rl.errors import GenerationFailure
from rl.placement import runs_on
from rl.recorder import Recorder, versions_of
from rl.stream import derive_seed
from rl.trajectory import Message, Span, Status, Trajectory
from tasks.agent import agent_of, play_agent
from tasks.environments import Live
from tasks.reset import Member
from tasks.runtime import Runtime, runtime


@runs_on("cpu")
async def interact(run: str, member: Member) -> Trajectory:
    """Play the episode. Raises StaleTrajectory, GenerationFailure, EnvironmentFailure, EnvironmentTimeout."""
    here = runtime(run)
    live = await here.environments.claim(member.key, member.problem)
    try:
        return await play(here, member, live)
    finally:
        await here.environments.release(live)


async def at_once() -> None:
    """The pace of an episode that waits for no other."""


async def play(
    here: Runtime, member: Member, live: Live, pace: Callable[[], Awaitable[None]] = at_once
) -> Trajectory:
    """The turns. `pace` is awaited before each generation and each step; an agent paces itself."""
    if (agent := agent_of(live)) is not None:
        return await play_agent(here, member, live, agent)
    config, codec, problem = here.config, here.codec, member.problem
    max_turns = config.domain(problem.domain).max_turns
    record = Recorder()
    record.observed(codec.open(live.opening, live.environment.tools))
    prompt_length = len(record.token_ids)
    messages, spans = list(live.opening), list(member.spans)
    mistakes: Counter[str] = Counter()
    status, reward, info, turns = Status.TRUNCATED, 0.0, {}, 0
    while turns < max_turns:
        room = config.rollout.max_tokens - len(record.token_ids)
        if room < 1:
            break
        await pace()
        start = time()
        generation = await _generate(here, member, record, min(room, config.rollout.max_new_tokens), turns)
        spans.append(Span("generate", start, time()))
        sampled = generation.token_ids
        record.sampled(sampled, generation.logprobs, versions_of(generation.version_spans, len(sampled)))
        turns += 1
        text = codec.decode([t for t in generation.token_ids if t not in codec.stop_token_ids])
        messages.append(Message("assistant", text))
        if generation.finish_reason == "length":
            break
        await pace()
        start = time()
        step = await here.environments.step(live, text)
        spans.append(Span("environment", start, time()))
        reward += step.reward or 0.0
        info = step.info
        if step.error is not None:
            mistakes[step.error] += 1
        messages.append(step.observation)
        if step.terminated or step.truncated:
            status = Status.TERMINATED if step.terminated else Status.TRUNCATED
            break
        if turns < max_turns:
            record.observed(codec.reply(step.observation))
    return Trajectory(
        uid=member.uid,
        member=member.member,
        problem=problem,
        start_version=member.version,
        prompt_length=prompt_length,
        token_ids=record.token_ids,
        loss_mask=record.loss_mask,
        logprobs=record.logprobs,
        versions=record.versions,
        messages=messages,
        status=status,
        turns=turns,
        retry=member.retry,
        environment_reward=reward,
        info=beside(live) | info | ({"mistakes": dict(mistakes)} if mistakes else {}),
        spans=spans + live.injected,
    )


def beside(live: Live) -> dict[str, Any]:
    """What goes into `info` before anything was said."""
    return {} if live.environment.difficulty is None else {"difficulty": live.environment.difficulty}


async def _generate(here: Runtime, member: Member, record: Recorder, room: int, turn: int) -> Generation:
    config, evaluation = here.config, member.problem.split == "heldout"
    seed = None
    if config.deterministic or evaluation:
        seed = derive_seed(config.seed, member.problem.seed, member.uid, member.member, member.retry, turn)
    temperature = config.evaluation.temperature if evaluation else config.rollout.temperature
    generation = await here.proxy.generate(
        trajectory=member.key,
        request=f"{member.key}-{turn}",
        tenant=config.served_as,
        domain=member.problem.domain,
        token_ids=record.token_ids,
        sampling=Sampling(temperature, room, here.codec.stop_token_ids, seed),
        start_version=member.version,
        evaluation=evaluation,
        deadline_s=config.deadlines.generate,
    )
    if generation.finish_reason == "abort":
        raise GenerationFailure(f"trajectory {member.key}: turn {turn} was aborted")
    return generation
