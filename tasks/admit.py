"""Stage admit: the last member closes the group, which becomes one immutable object in the buffer.

Invariants: idempotent by uid (the object's key is the attempt's, created if absent); what is sealed was checked;
only whole groups are sealed here (the rollout flow seals the tombstones).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from time import time

from infra.store.buffer import Receipt
from rl.placement import runs_on
from rl.selection import Candidate
from rl.trajectory import Group, Span, Status, Trajectory
from tasks.runtime import runtime


@dataclass(frozen=True)
class Sealed:
    """What the rollout flow keeps of a group: enough for admission, progress and the timeline."""

    candidate: Candidate
    domain: str
    rewards: tuple[float, ...]
    turns: float
    """Mean turns per trajectory."""
    generated_tokens: int
    truncated: int
    retries: int
    spans: tuple[Span, ...]
    size: int
    """Bytes in the store."""
    segment: str
    """Its key there, below the run."""


@runs_on("cpu")
def admit(run: str, *members: Trajectory) -> Sealed:
    """Close the group and seal it. Where spares were started, members may lack numbers: they are numbered anew."""
    for number, member in enumerate(sorted(members, key=lambda m: m.member)):
        member.member = number
    group = Group.of(members)
    start = time()
    receipt = runtime(run).buffer.seal([group], writer=f"g{group.uid.ordinal:010d}", seq=group.uid.attempt)
    return summary(group, receipt, Span("admit", start, time()))


@dataclass(frozen=True)
class Played:
    """What evaluation keeps of a problem: of each sample the reward, the turns, and whether a limit ended it."""

    rewards: tuple[float, ...]
    turns: tuple[int, ...]
    truncated: tuple[bool, ...]
    difficulty: str | float | None
    """As the environment tells it (`Environment.difficulty`)."""


@runs_on("cpu")
def collect(run: str, *members: Trajectory) -> Played:
    """Close a group that is only looked at (evaluation): nothing is sealed."""
    group = Group.of(members)
    return Played(
        tuple(group.rewards),
        tuple(m.turns for m in group.members),
        tuple(m.status is Status.TRUNCATED for m in group.members),
        group.members[0].info.get("difficulty"),
    )


def summary(group: Group, receipt: Receipt, sealing: Span) -> Sealed:
    members = group.members
    return Sealed(
        Candidate.of(group),
        group.problem.domain,
        tuple(group.rewards),
        sum(m.turns for m in members) / max(1, len(members)),
        sum(m.generated_tokens for m in members),
        Counter(m.status for m in members)[Status.TRUNCATED],
        sum(m.retry for m in members),
        (*(span for m in members for span in m.spans), sealing),
        receipt.size,
        receipt.key,
    )
