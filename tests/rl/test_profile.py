"""What a domain's generation consists of."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.placement import HardwareClass
from rl.profile import Turn, fit, profile, turns
from rl.trajectory import NO_VERSION, Problem, Span, Status, Trajectory, Uid


def trajectory(*shape: tuple[int, int], seconds: tuple[float, ...] = ()) -> Trajectory:
    """Of turns (new tokens, sampled tokens), each of which took so long."""
    mask = [bit for fresh, sampled in shape for bit in [0] * fresh + [1] * sampled]
    return Trajectory(
        uid=Uid(0, 0),
        member=0,
        problem=Problem(0, "d", 0, 0),
        start_version=0,
        prompt_length=shape[0][0],
        token_ids=[1] * len(mask),
        loss_mask=mask,
        logprobs=[-1.0 * bit for bit in mask],
        versions=[0 if bit else NO_VERSION for bit in mask],
        messages=[],
        status=Status.TERMINATED,
        turns=len(shape),
        spans=[Span("reset", 0, 1), *(Span("generate", 10.0 * i, 10.0 * i + s) for i, s in enumerate(seconds))],
    )


SHAPES = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 20)), min_size=1, max_size=6)


@given(SHAPES)
def test_turns_are_read_off_the_mask(shape: list[tuple[int, int]]) -> None:
    assert [(t.fresh, t.sampled) for t in turns(trajectory(*shape))] == shape


@given(st.lists(SHAPES, min_size=8, max_size=20), st.tuples(*[st.floats(0, 1)] * 3))
@settings(max_examples=50)
def test_seconds_are_explained_as_they_were_made(
    shapes: list[list[tuple[int, int]]], cost: tuple[float, float, float]
) -> None:
    fixed, per_fresh, per_sampled = cost
    all_turns = [
        Turn(fresh, sampled, fixed + per_fresh * fresh + per_sampled * sampled)
        for shape in shapes
        for fresh, sampled in shape
    ]
    found = fit(all_turns)
    assert found is not None and min(found.fixed, found.per_fresh, found.per_sampled) >= 0
    for turn in all_turns:
        said = found.fixed + found.per_fresh * turn.fresh + found.per_sampled * turn.sampled
        assert said == pytest.approx(turn.seconds, rel=1e-3, abs=1e-3)


def test_a_domain_is_put_where_its_tokens_are() -> None:
    long_prompts = [trajectory((400 + n, 5), (300, 4 + n % 3), seconds=(0.9 + n / 1000, 0.7)) for n in range(10)]
    found = profile("reader", long_prompts, prefill_heavy=32.0)
    assert found is not None
    assert (found.runs_on, found.trajectories, found.turns, found.heavy) == (HardwareClass.COMPUTE_GPU, 10, 20, 1.0)
    assert found.prefill_share is not None and 0 <= found.prefill_share <= 1
    writers = [trajectory((20, 100)) for _ in range(10)]
    found = profile("writer", writers, prefill_heavy=32.0)
    assert found is not None
    assert (found.runs_on, found.cost, found.prefill_share) == (HardwareClass.BANDWIDTH_GPU, None, None)
    assert found.as_json()["ratio"] == pytest.approx(0.2)
    assert profile("nothing", [], 32.0) is None


def test_what_can_not_be_told_apart_is_not_made_up() -> None:
    assert fit([Turn(10, 5, 1.0)] * 7) is None, "too few"
    alike = fit([Turn(10, 5, 1.0)] * 20)
    assert alike is not None
    assert sum(cost > 0 for cost in (alike.fixed, alike.per_fresh, alike.per_sampled)) == 1, "one cause is enough"
