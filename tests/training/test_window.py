"""Rows, dealing, collating: properties that need no model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.training.window import BadAdvantages, Row, Window, collate, deal, loss_scale, padding, rows_of
from rl.advantages.registry import advantage_function
from tests.training.small import make_group

lengths = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40)), min_size=1, max_size=40)


def row(prompt: int, more: int, name: int = 0) -> Row:
    n = prompt + more
    mask = [0] * prompt + [1] * more
    return Row([name] * n, mask, [-1.0 * m for m in mask], [0] * n, prompt, 1.0)


@given(lengths, st.integers(1, 8), st.integers(1, 3))
def test_every_row_is_dealt_once_and_ranks_agree_on_the_number(
    sizes: list[tuple[int, int]], micro: int, world: int
) -> None:
    rows = [row(p, m, i + 1) for i, (p, m) in enumerate(sizes)]
    dealt = [deal(rows, micro, world, rank) for rank in range(world)]
    assert len({tuple(map(len, d)) for d in dealt}) == 1
    assert all(1 <= len(piece) <= micro for d in dealt for piece in d)
    names = Counter(r.token_ids[0] for d in dealt for piece in d for r in piece if sum(r.loss_mask))
    assert names == Counter(range(1, len(rows) + 1))


@given(lengths, st.integers(1, 8), st.integers(1, 3))
def test_dealing_by_length_pads_no_more_than_arrival_order(
    sizes: list[tuple[int, int]], micro: int, world: int
) -> None:
    rows = [row(p, m) for p, m in sizes]
    dealt = [piece for rank in range(world) for piece in deal(rows, micro, world, rank)]
    ordered = sorted(len(r.token_ids) for r in rows)
    assert all(max(len(r.token_ids) for r in piece) in ordered for piece in dealt)
    arrival = [rows[k : k + micro] for k in range(0, len(rows), micro)]
    if world == 1 and len(rows) % micro == 0:
        assert padding(dealt) <= padding(arrival) + 1e-12


@settings(max_examples=30)
@given(lengths)
def test_collate_keeps_every_token_mask_and_log_prob(sizes: list[tuple[int, int]]) -> None:
    rows = [row(p, m, i + 1) for i, (p, m) in enumerate(sizes)]
    batch = collate(rows, 0, "cpu")
    for k, r in enumerate(rows):
        n = len(r.token_ids)
        ids = batch["prompt_ids"][k].tolist() + batch["completion_ids"][k].tolist()
        assert ids[:n] == r.token_ids and not any(ids[n:])
        cut = batch["prompt_ids"].size(1)
        assert batch["completion_mask"][k].tolist() == [1] * (n - cut) + [0] * (len(ids) - n)
        assert batch["tool_mask"][k].tolist()[: n - cut] == r.loss_mask[cut:]
        assert batch["sampling_per_token_logps"][k].tolist()[: n - cut] == r.logprobs[cut:]


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "bnpo", "dapo", "cispo"])
@given(lengths, st.integers(1, 8), st.integers(1, 3))
def test_the_shares_of_the_micro_batches_make_one_window(
    loss: str, sizes: list[tuple[int, int]], micro: int, world: int
) -> None:
    """With TRL's own divisor put back, every row (or token) weighs one over the window's number of them."""
    window = Window(1, [row(p, m) for p, m in sizes])
    for rank in range(world):
        for piece in deal(window.rows, micro, world, rank):
            tokens = sum(sum(r.loss_mask) for r in piece)
            divisor = {
                "bnpo": max(1, tokens),
                "dapo": window.tokens / world,
                "cispo": window.tokens / world,
            }.get(loss, len(piece))
            weight = loss_scale(loss, piece, window, world) / divisor / world  # DDP averages over ranks
            assert weight == pytest.approx(
                1 / (len(window.rows) if loss in ("grpo", "dr_grpo") else window.tokens)
            )


def test_rows_carry_advantages_and_freshness() -> None:
    group = make_group(3, 4, version=2, rewards=lambda k, _: float(k == 0))
    rows = rows_of([group], advantage_function("dr_grpo"), base=2)
    assert [r.advantage for r in rows] == [0.75, -0.25, -0.25, -0.25]
    assert rows[0].fresh == rows[0].loss_mask
    assert not any(rows_of([group], advantage_function("grpo"), base=3)[0].fresh)


@pytest.mark.parametrize("values", [[1.0], [float("nan")] * 4])
def test_an_advantage_function_that_misbehaves_is_named(values: list[float]) -> None:
    with pytest.raises(BadAdvantages, match=r"for rewards .* it gave"):
        rows_of([make_group(3, 4)], lambda rewards: values, base=0)
