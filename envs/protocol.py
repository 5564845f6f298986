"""What an environment is: asynchronous, Gymnasium-shaped, single-use.

Invariants
- One instance serves one episode: `reset` once, `step` until it ends, `close` always (also after an error).
- Equal problems and equal actions give equal episodes: all randomness comes from `Problem.seed`.
- `Problem.split` partitions the problem space, not only the seeds: a held-out problem can not occur in training.
- An environment never reports its own failure as a reward; it raises.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rl.stream import derive_seed
from rl.trajectory import Message, Problem


@dataclass(frozen=True)
class Hints:
    """What a domain tells placement about itself before anything was measured."""

    expected_turns: int = 4
    prompt_tokens: int = 256
    response_tokens: int = 64


@dataclass(frozen=True)
class Step:
    """The environment's answer to one action."""

    observation: Message
    """Ignored by the policy once the episode has ended, but kept in the transcript."""
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    """JSON types only; the last one is stored with the trajectory."""


class Environment(ABC):
    """Base of every environment. Options of the configuration are constructor keywords."""

    hints: ClassVar[Hints] = Hints()
    tools: ClassVar[tuple[dict[str, Any], ...]] = ()
    """JSON schemas of callable tools, for chat templates that show them."""

    @abstractmethod
    async def reset(self, problem: Problem) -> list[Message]:
        """Start the episode; the opening messages (system, user)."""

    @abstractmethod
    async def step(self, action: str) -> Step:
        """Apply the text of one model turn."""

    async def close(self) -> None:  # noqa: B027  most hold nothing
        """Release what the episode holds; idempotent."""

    def expert_action(self) -> str:
        """What a demonstrator would say now; needed for a warm start only."""
        raise NotImplementedError(f"{type(self).__name__} has no expert: a warm start can not use it")


class SyncEnvironment(Environment):
    """For environments whose calls block: write `reset_sync`, `step_sync`, `close_sync`; each runs in a thread."""

    @abstractmethod
    def reset_sync(self, problem: Problem) -> list[Message]: ...

    @abstractmethod
    def step_sync(self, action: str) -> Step: ...

    def close_sync(self) -> None:
        """Release what the episode holds; idempotent."""

    async def reset(self, problem: Problem) -> list[Message]:
        return await asyncio.to_thread(self.reset_sync, problem)

    async def step(self, action: str) -> Step:
        return await asyncio.to_thread(self.step_sync, action)

    async def close(self) -> None:
        await asyncio.to_thread(self.close_sync)


HELD_OUT_SHARE = 5


def in_split(fingerprint: object, split: str) -> bool:
    """Whether a generated problem of this fingerprint belongs to the split: one fifth is held out."""
    return (derive_seed("split", fingerprint) % HELD_OUT_SHARE == 0) == (split == "heldout")
