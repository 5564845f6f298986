"""Problems, trajectories and groups: what flows through the pipeline.

Invariants
- `token_ids`, `loss_mask`, `logprobs` and `versions` of a trajectory have one length; where `loss_mask` is 0
  the log-prob is 0.0 and the version `NO_VERSION`; where it is 1 the model sampled the token, under that
  version, with that log-prob (after temperature).
- The first `prompt_length` tokens are the first observation and have mask 0.
- A group has the members of one problem and one attempt; its version is the least start version over them.
- The columns of numbers of a trajectory are packed arrays, whatever it is made of: a tenth of the memory and of the
  time to pickle that lists of objects take. Log-probs are float32, in which engines compute.
- A tombstone is a group without members: it carries the reason for which the attempt is given up.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

NO_VERSION = -1
PACKED = {"token_ids": "i", "loss_mask": "B", "logprobs": "f", "versions": "q"}
"""The columns of one number per token: int32, uint8, float32, int64."""


@dataclass(frozen=True, order=True, slots=True)
class Uid:
    """One attempt at one problem of the stream. Written as `ordinal.attempt`."""

    ordinal: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.ordinal}.{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> Uid:
        ordinal, _, attempt = text.partition(".")
        if not (ordinal.isdecimal() and attempt.isdecimal()):
            raise ValueError(f"uid {text!r} is not 'ordinal.attempt'")
        return cls(int(ordinal), int(attempt))


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to solve. `seed` and `split` determine it; `index` counts within its domain."""

    ordinal: int
    domain: str
    index: int
    seed: int
    split: str = "train"


class Status(StrEnum):
    """How an episode ended. Failures are exceptions, not statuses."""

    TERMINATED = "terminated"
    """The environment ended it."""
    TRUNCATED = "truncated"
    """A limit on turns or tokens ended it."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the readable transcript; `role` is system, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Span:
    """Wall-clock interval of one stage, in seconds since the epoch."""

    stage: str
    start: float
    end: float


@dataclass(slots=True)
class Trajectory:
    """One episode on one problem, token-exact, with provenance."""

    uid: Uid
    member: int
    problem: Problem
    start_version: int
    prompt_length: int
    token_ids: MutableSequence[int]
    loss_mask: MutableSequence[int]
    logprobs: MutableSequence[float]
    versions: MutableSequence[int]
    messages: list[Message]
    status: Status
    turns: int
    retry: int = 0
    """How many earlier tries of this member failed for infrastructure reasons."""
    environment_reward: float = 0.0
    """Sum of the rewards that the environment itself gave."""
    info: dict[str, Any] = field(default_factory=dict)
    """What the environment said at the end (JSON types only)."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward; empty until scored."""
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, code in PACKED.items():
            values = getattr(self, name)
            if not (isinstance(values, array) and values.typecode == code):
                setattr(self, name, array(code, values))

    @property
    def reward(self) -> float:
        """The sum of the reward parts."""
        return sum(self.rewards.values())

    @property
    def generated_tokens(self) -> int:
        return sum(self.loss_mask)

    def check(self) -> None:
        """Raise ValueError when an invariant of this module does not hold."""
        n = len(self.token_ids)
        lengths = (len(self.loss_mask), len(self.logprobs), len(self.versions))
        if any(length != n for length in lengths):
            raise ValueError(f"trajectory {self.uid}/{self.member}: {n} tokens but mask, log-probs, versions {lengths}")
        if self.start_version < 0:
            raise ValueError(f"trajectory {self.uid}/{self.member}: start_version {self.start_version}")
        if not 0 < self.prompt_length <= n or any(self.loss_mask[: self.prompt_length]):
            raise ValueError(f"trajectory {self.uid}/{self.member}: prompt_length {self.prompt_length} of {n} tokens")
        for at, (mask, logprob, version) in enumerate(zip(self.loss_mask, self.logprobs, self.versions, strict=True)):
            if mask == 1 and (version < self.start_version or not math.isfinite(logprob) or logprob > 1e-4):
                raise ValueError(
                    f"trajectory {self.uid}/{self.member}: token {at} has version {version}, log-prob {logprob}"
                )
            if mask == 0 and (version != NO_VERSION or logprob != 0.0):
                raise ValueError(f"trajectory {self.uid}/{self.member}: unsampled token {at} has provenance")
            if mask not in (0, 1):
                raise ValueError(f"trajectory {self.uid}/{self.member}: mask {mask} at token {at}")


@dataclass(slots=True)
class Group:
    """The trajectories of one attempt at one problem: the unit of advantage, staleness and storage."""

    uid: Uid
    problem: Problem
    version: int
    members: list[Trajectory]
    tombstone: str | None = None
    """Why the attempt is given up; a tombstone has no members."""

    @classmethod
    def of(cls, members: Sequence[Trajectory]) -> Group:
        """Close a group. Raises ValueError unless all members are scored tries at one attempt, each once."""
        if not members:
            raise ValueError("a group has at least one member")
        first = members[0]
        if any(m.uid != first.uid or m.problem != first.problem for m in members):
            raise ValueError(f"group {first.uid}: members of different attempts")
        if first.problem.ordinal != first.uid.ordinal:
            raise ValueError(f"group {first.uid}: its problem has ordinal {first.problem.ordinal}")
        if sorted(m.member for m in members) != list(range(len(members))):
            raise ValueError(f"group {first.uid}: members {sorted(m.member for m in members)}")
        for member in members:
            member.check()
            if not member.rewards or not all(math.isfinite(part) for part in member.rewards.values()):
                raise ValueError(f"group {first.uid}: member {member.member} has rewards {member.rewards}")
        ordered = sorted(members, key=lambda m: m.member)
        return cls(first.uid, first.problem, min(m.start_version for m in members), ordered)

    @classmethod
    def give_up(cls, uid: Uid, problem: Problem, version: int, reason: str) -> Group:
        """A tombstone; `version` is the head at the time, so that readers of the window see it. (The version
        that the engines serve may have left the window already: under alpha 0 it has, from commit to update.)"""
        return cls(uid, problem, version, [], tombstone=reason)

    @property
    def rewards(self) -> list[float]:
        return [m.reward for m in self.members]

    @property
    def informative(self) -> bool:
        """Whether the rewards differ, so that a group-relative advantage is not all zero."""
        rewards = self.rewards
        return bool(rewards) and max(rewards) - min(rewards) > 1e-9


def mean_reward_parts(members: Sequence[Trajectory]) -> Mapping[str, float]:
    """Mean of every reward part over `members` (parts missing in one count as 0)."""
    names = sorted({name for m in members for name in m.rewards})
    return {name: sum(m.rewards.get(name, 0.0) for m in members) / len(members) for name in names}
