"""Code scored by tests in the sandbox, apart from the episode that wrote it.

An environment that leaves grading to this reward ends its episode with `info["code"]` and `info["exam"]` (the fields
of `infra.sandbox.grading.Exam`); `envs/code_tests.py` does with `graded_by_reward`.

Invariant: code that fails, hangs or cheats scores what it passed; a sandbox that fails raises.
"""

from __future__ import annotations

from typing import Literal

from infra.sandbox.grading import Exam, grade
from infra.sandbox.limits import Limits
from infra.sandbox.sandbox import Sandbox
from infra.sandbox.supervision import Isolation
from rewards.protocol import TrajectoryView
from rl.trajectory import Status


def code_tests(
    view: TrajectoryView,
    credit: Literal["all", "share"] = "all",
    seconds: float = 20.0,
    isolation: Isolation = "full",
) -> dict[str, float]:
    """One part, `tests`: 1 if all tests pass, else 0; with `credit: share`, the share that passes.

    An episode that was cut off before it submitted code scores 0. Raises ValueError for one that ended without leaving
    code and exam, SandboxUnavailable and SandboxFailure.
    """
    if credit not in ("all", "share"):
        raise ValueError(f"credit ({credit!r}) must be 'all' or 'share'")
    if "exam" not in view.info:
        if view.status is Status.TRUNCATED:
            return {"tests": 0.0}
        raise ValueError("info has no 'exam'; set the environment's option graded_by_reward, or use another reward")
    exam = Exam(**view.info["exam"])
    verdict = grade(Sandbox(Limits(seconds=seconds, cpu_seconds=3), isolation), view.info["code"], exam)
    share = verdict.passed / len(exam.tests)
    return {"tests": share if credit == "share" else float(share == 1.0)}
