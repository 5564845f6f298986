"""What a unit's state says in Prefect's UI: how long each stage of a trajectory took.

    reset 0.01 s, interact 1.23 s (4 turns: 1.10 s generating, 0.08 s in the environment), score 0.00 s, admit 0.01 s

Invariant: pure; made of the spans that the stages measured themselves, so that it costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from rl.errors import StageFailure
from rl.trajectory import Span, Trajectory
from tasks.admit import Sealed

FAILED_IN = {
    "environment_start": "reset",
    "environment_error": "interact",
    "environment_timeout": "interact",
    "environment_protocol": "interact",
    "injected": "interact",
    "generation_error": "interact",
    "stale": "interact",
    "reward_error": "score",
}


def durations(spans: Sequence[Span], members: int = 1) -> str:
    """Seconds by stage, as means over `members`."""
    if not spans or members < 1:
        return ""

    def seconds(stage: str) -> float:
        return sum(s.end - s.start for s in spans if s.stage == stage) / members

    turns = sum(s.stage == "generate" for s in spans) / members
    generating, environment = seconds("generate"), seconds("environment")
    said = [
        f"reset {seconds('reset'):.2f} s",
        f"interact {generating + environment:.2f} s ({turns:.3g} turns: {generating:.2f} s generating, "
        f"{environment:.2f} s in the environment)",
        f"score {seconds('score'):.2f} s",
    ]
    if any(s.stage == "admit" for s in spans):
        said.append(f"admit {sum(s.end - s.start for s in spans if s.stage == 'admit'):.2f} s")
    return ", ".join(said)


def of_group(sealed: Sealed) -> str:
    """Of what `tasks.admit` gave."""
    rewards = sealed.rewards
    mean = "" if len(rewards) == 1 else f"per trajectory of {len(rewards)}: "
    return f"sealed, reward {sum(rewards) / len(rewards):.3f}; {mean}{durations(sealed.spans, len(rewards))}"


def of_trajectory(trajectory: Trajectory) -> str:
    """Of one scored member."""
    return f"scored, reward {trajectory.reward:.3f}; {durations(trajectory.spans)}"


def of_failure(failure: StageFailure) -> str:
    where = FAILED_IN.get(failure.reason)
    return f"{failure.reason}{f' in {where}' if where else ''}: {failure}"
