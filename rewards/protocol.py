"""What a reward is: a stateless function from a view of one finished trajectory to named parts.

Invariants: no I/O state between calls; equal views give equal parts; parts are finite numbers; a reward that
can not be computed raises and is never 0. A judge alone depends on more than the view: on the model it asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rl.trajectory import Message, Problem, Status, Trajectory


@dataclass(frozen=True)
class TrajectoryView:
    """What a reward function may see."""

    problem: Problem
    messages: Sequence[Message]
    status: Status
    turns: int
    generated_tokens: int
    environment_reward: float
    info: dict[str, Any]

    @classmethod
    def of(cls, t: Trajectory) -> TrajectoryView:
        return cls(t.problem, t.messages, t.status, t.turns, t.generated_tokens, t.environment_reward, t.info)

    def as_json(self) -> dict[str, Any]:
        """JSON types only; `from_json` gives an equal view."""
        return {
            "problem": asdict(self.problem),
            "messages": [[message.role, message.content] for message in self.messages],
            "status": self.status.value,
            "turns": self.turns,
            "generated_tokens": self.generated_tokens,
            "environment_reward": self.environment_reward,
            "info": self.info,
        }

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> TrajectoryView:
        """Raises KeyError, TypeError or ValueError for what `as_json` did not write."""
        fields = dict(tree)
        fields["problem"] = Problem(**tree["problem"])
        fields["messages"] = [Message(role, content) for role, content in tree["messages"]]
        fields["status"] = Status(tree["status"])
        return cls(**fields)

    @property
    def final(self) -> str:
        """What the policy said last; empty if it said nothing."""
        return next((m.content for m in reversed(self.messages) if m.role == "assistant"), "")


Reward = Callable[..., dict[str, float]]
"""`score(view, **options) -> parts`; the reward of the trajectory is the sum of the parts. A reward with a parameter
`ask` gets an `Ask`, handed in by whoever scores; all other parameters are options of the configuration."""

Ask = Callable[[Sequence[Message]], str]
"""One reply of a language model to a conversation. Raises RollmillError when there is none in time."""
