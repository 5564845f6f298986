"""What an environment is: asynchronous, Gymnasium-shaped, single-use.

Invariants
- One instance serves one episode: `reset` once, `step` until it ends, `close` always (also after an error).
- Equal problems and equal actions give equal episodes: all randomness comes from `Problem.seed`.
- `Problem.split` partitions the problem space, not only the seeds: a held-out problem can not occur in training.
- An environment never reports its own failure as a reward; it raises. A mistake of the policy is no failure: it
  is answered by a step whose `error` names it.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from envs.threads import Lane
from rl.stream import derive_seed
from rl.trajectory import Message, Problem

T = TypeVar("T")


@dataclass(frozen=True)
class Hints:
    """What a domain tells placement about itself before anything was measured."""

    expected_turns: int = 4
    prompt_tokens: int = 256
    response_tokens: int = 64


@dataclass(frozen=True)
class Needs:
    """What one live instance takes of its worker."""

    memory_mb: int = 1
    processes: int = 0
    """Child processes beside the worker's own."""
    sandbox: bool = False
    """Whether it runs untrusted code, and so needs a machine with a working sandbox."""


class Mistake(StrEnum):
    """The common kinds of mistake that an action is. An environment may use names of its own beside these."""

    INVALID = "invalid"
    """It can not be read."""
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    TOOL_ERROR = "tool_error"
    """A proper call that the tool refuses: no such page, division by zero."""


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
    error: str | None = None
    """Which kind of mistake the *action* was (see `Mistake`); None for a proper one."""


class Environment(ABC):
    """Base of every environment. Options of the configuration are constructor keywords."""

    hints: ClassVar[Hints] = Hints()
    needs: ClassVar[Needs] = Needs()
    reset_deadline_s: float = math.inf
    """Longest `reset` in seconds; the smaller of this and the configured one counts."""
    step_deadline_s: float = math.inf
    """Longest `step` or `close` in seconds; the smaller of this and the configured one counts."""
    tools: Sequence[dict[str, Any]] = ()
    """JSON schemas of callable tools, for chat templates that show them; read after `reset`."""
    difficulty: str | float | None = None
    """How hard the problem is, in the environment's own measure, by which evaluation reports apart; read after
    `reset`."""

    @classmethod  # noqa: B027  most need nothing
    def fetch(cls, options: Mapping[str, Any]) -> None:
        """Get and build what `prepare` finds on this machine, once per machine and with the network; called by
        `rollmill env prepare` only. Raises ConfigError with the mend."""

    @classmethod  # noqa: B027  most share nothing
    def prepare(cls, options: Mapping[str, Any]) -> None:
        """Make heavy data that instances share (an index, say); called once per worker and options, in a thread,
        before the first instance is constructed. `options` are the constructor's keywords."""

    @abstractmethod
    async def reset(self, problem: Problem) -> list[Message]:
        """Start the episode; the opening messages (system, user)."""

    @abstractmethod
    async def step(self, action: str) -> Step:
        """Apply the text of one model turn."""

    async def close(self) -> None:  # noqa: B027  most hold nothing
        """Release what the episode holds; idempotent, and safe before `reset`."""

    def fingerprint(self) -> object:
        """What tells this problem from every other, after `reset`; None if the opening messages do. The split should
        be decided by it (`in_split`)."""
        return None

    def expert_action(self) -> str:
        """What a demonstrator would say now; needed for a warm start only."""
        raise NotImplementedError(f"{type(self).__name__} has no expert: a warm start can not use it")

    def random_action(self, rng: random.Random) -> str:
        """What an agent would say that knows the form of an action and nothing else; a yardstick for `env check`."""
        return str(rng.randrange(10))

    async def in_thread(self, work: Callable[[], T]) -> T:
        """What blocking `work` returns or raises, run in a thread that belongs to this instance."""
        return await self._lane.call(work)

    @cached_property
    def _lane(self) -> Lane:
        return Lane(f"environment-{type(self).__name__}")


class SyncEnvironment(Environment):
    """For environments whose calls block: write `reset_sync`, `step_sync`, `close_sync`. They run one after the
    other in one thread of the instance's own."""

    @abstractmethod
    def reset_sync(self, problem: Problem) -> list[Message]: ...

    @abstractmethod
    def step_sync(self, action: str) -> Step: ...

    def close_sync(self) -> None:
        """Release what the episode holds; idempotent."""

    async def reset(self, problem: Problem) -> list[Message]:
        return await self.in_thread(lambda: self.reset_sync(problem))

    async def step(self, action: str) -> Step:
        return await self.in_thread(lambda: self.step_sync(action))

    async def close(self) -> None:
        """Close in the thread; behind a call that hangs it is left to follow that call, should it ever return."""
        if self._lane.busy:
            self._lane.post(self.close_sync)
        else:
            await self.in_thread(self.close_sync)


HELD_OUT_SHARE = 5


def in_split(fingerprint: object, split: str) -> bool:
    """Whether a generated problem of this fingerprint belongs to the split: one fifth is held out."""
    return (derive_seed("split", fingerprint) % HELD_OUT_SHARE == 0) == (split == "heldout")
