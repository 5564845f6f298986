"""Plays episodes in this process: the expert's as demonstrations, the policy's for a look at its reward.

Used before there is a run. Environments come from the caller as anything of this shape, for infra does not know
`envs`. Both ways make their tokens with ChatCodec alone, so that a demonstration is token by token what rollout
would have recorded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from infra.chat import ChatCodec
from rl.config.work import DomainSection
from rl.trajectory import Message, Problem


class Answer(Protocol):
    """What `step` gives; see `envs.protocol.Step`."""

    @property
    def observation(self) -> Message: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def terminated(self) -> bool: ...
    @property
    def truncated(self) -> bool: ...


class Playable(Protocol):
    """What an episode needs of an environment; see `envs.protocol.Environment`."""

    @property
    def tools(self) -> Sequence[dict[str, Any]]: ...
    async def reset(self, problem: Problem) -> list[Message]: ...
    async def step(self, action: str) -> Answer: ...
    async def close(self) -> None: ...
    def expert_action(self) -> str: ...


MakeEnvironment = Callable[[DomainSection], Playable]
Turn = Callable[[list[int]], Awaitable[list[int] | None]]
"""From the history to the tokens of one whole turn, its stop token included; None if it was cut off."""


@dataclass(frozen=True, slots=True)
class Episode:
    """Tokens, with mask 1 where the policy (or the expert) speaks, and the sum of the rewards."""

    token_ids: list[int]
    mask: list[int]
    reward: float


async def play(
    environment: Playable, problem: Problem, codec: ChatCodec, turn: Turn, max_turns: int, max_tokens: int
) -> Episode:
    """One episode. It ends where the environment says so, at a limit, or with a turn that was cut off."""
    try:
        ids = codec.open(await environment.reset(problem), environment.tools)
        mask = [0] * len(ids)
        reward = 0.0
        for _ in range(max_turns):
            said = await turn(ids) if len(ids) < max_tokens else None
            if said is None:
                break
            ids, mask = ids + said, mask + [1] * len(said)
            answer = await environment.step(codec.decode(said))
            reward += answer.reward or 0.0
            if answer.terminated or answer.truncated:
                break
            observed = codec.reply(answer.observation)
            ids, mask = ids + observed, mask + [0] * len(observed)
        return Episode(ids, mask, reward)
    finally:
        await environment.close()


async def demonstrate(
    environment: Playable, problem: Problem, codec: ChatCodec, max_turns: int, max_tokens: int
) -> Episode:
    """One episode of the environment's own expert."""

    async def turn(_: list[int]) -> list[int]:
        return codec.turn(environment.expert_action())

    return await play(environment, problem, codec, turn, max_turns, max_tokens)
