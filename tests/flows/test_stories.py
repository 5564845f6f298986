"""What a unit says of itself in Prefect's UI."""

from __future__ import annotations

from flows.stories import durations, of_failure, of_group
from rl.errors import EnvironmentStartFailure, RewardFailure
from rl.selection import Candidate
from rl.trajectory import Span, Uid
from tasks.admit import Sealed

SPANS = (
    Span("reset", 0.0, 0.25),
    Span("generate", 1.0, 2.0),
    Span("environment", 2.0, 2.5),
    Span("generate", 3.0, 3.5),
    Span("score", 4.0, 4.125),
)


def test_every_stage_is_told_with_its_duration() -> None:
    assert durations(SPANS) == (
        "reset 0.25 s, interact 2.00 s (2 turns: 1.50 s generating, 0.50 s in the environment), score 0.12 s"
    )


def test_a_group_tells_means_over_its_members_and_its_one_seal() -> None:
    spans = (*SPANS, *SPANS, Span("admit", 5.0, 5.5))
    sealed = Sealed(Candidate(Uid(1, 0), 3, True), "lake", (0.0, 1.0), 2.0, 8, 0, 0, spans, 100, "groups/x.parquet")
    assert of_group(sealed).startswith("sealed, reward 0.500; per trajectory of 2: reset 0.25 s, interact 2.00 s")
    assert of_group(sealed).endswith("admit 0.50 s")


def test_a_failure_tells_in_which_stage_it_was() -> None:
    assert of_failure(RewardFailure("no")) == "reward_error in score: no"
    assert of_failure(EnvironmentStartFailure("no")).startswith("environment_start in reset")
