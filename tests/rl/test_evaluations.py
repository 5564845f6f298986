"""Which versions are evaluated while training goes on, and the slot that it takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rl.config.load import validate
from rl.config.work import EvaluationSection
from tests.rl.test_config import PLAIN, complaint


@given(st.integers(1, 9), st.none() | st.integers(0, 40), st.integers(1, 40))
def test_every_nth_version_is_due_but_for_the_first_and_the_last(every: int, head: int | None, steps: int) -> None:
    due = EvaluationSection(every=every).due(head, steps)
    assert list(due) == [v for v in range(1, steps) if v % every == 0 and head is not None and v <= head]
    assert not EvaluationSection(every=every, problems=0).due(head, steps)
    assert not EvaluationSection().due(head, steps)


def test_an_engine_that_evaluates_beside_rollout_needs_a_slot() -> None:
    (line,) = complaint(evaluation={"every": 2})
    assert "pools.bandwidth_gpu (1)" in line and "evaluation.every" in line and "set it to 2" in line
    config = validate(PLAIN | {"evaluation": {"every": 2}, "pools": {"type": "local", "bandwidth_gpu": 2}}, "run.yaml")
    assert config.engine_slots == {"bandwidth_gpu": 2}
    assert validate(PLAIN | {"evaluation": {"every": 2, "problems": 0}}, "run.yaml").engine_slots == {
        "bandwidth_gpu": 1
    }
