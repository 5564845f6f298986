"""From the groups of one batch to the micro-batches of one optimizer step.

    groups -> rows (advantage and lag of each trajectory) -> deal (micro-batches of each rank) -> collate (tensors)

Invariants
- The gradient of a window does not depend on how its rows are dealt: `loss_scale` turns TRL's loss of each
  micro-batch, which is a mean over that micro-batch, into its share of the mean over the window and over all
  processes.
- Every rank gets the same number of micro-batches, and of rows in each (DDP's and TRL's collectives match);
  where rows run out there are idle ones, whose mask is all 0.
- Rows are dealt by length: what is padded together is of like length, and ranks work on like lengths at a time.
- Padding stands on the right only. A micro-batch is cut at its shortest prompt, or before its last token where nothing
  follows the prompts (TRL takes no completion for all of it); what remains of longer prompts is masked from the loss,
  not from attention, exactly like the environment's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from rl.advantages.registry import Advantages
from rl.errors import RollmillError
from rl.trajectory import Group


class BadAdvantages(RollmillError):
    """An advantage function gave something else than one finite number per reward."""


@dataclass(frozen=True, slots=True)
class Row:
    """One trajectory as the optimizer sees it."""

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    """Of the behaviour policy, after temperature; 0.0 where the mask is 0."""
    fresh: list[int]
    """1 where the token was sampled under the very version that this step starts from."""
    prompt_length: int
    advantage: float


@dataclass(frozen=True, slots=True)
class Window:
    """What one optimizer step trains, on all ranks together."""

    version: int
    """The version that the step makes."""
    rows: list[Row]

    @property
    def tokens(self) -> int:
        """Sampled tokens: the denominator of token-mean losses."""
        return sum(sum(row.loss_mask) for row in self.rows)


def rows_of(groups: Sequence[Group], advantages: Advantages, base: int) -> list[Row]:
    """The rows of a batch in its order; `base` is the version that the step starts from. Raises BadAdvantages."""
    rows = []
    for group in groups:
        values = advantages(group.rewards)
        if len(values) != len(group.members) or not all(map(math.isfinite, values)):
            raise BadAdvantages(f"training.advantage: for rewards {group.rewards} it gave {values}")
        for member, advantage in zip(group.members, values, strict=True):
            rows.append(
                Row(
                    token_ids=list(member.token_ids),
                    loss_mask=list(member.loss_mask),
                    logprobs=list(member.logprobs),
                    fresh=[int(version == base) for version in member.versions],
                    prompt_length=member.prompt_length,
                    advantage=advantage,
                )
            )
    return rows


def deal(rows: Sequence[Row], micro_batch_size: int, world: int, rank: int) -> list[list[Row]]:
    """The micro-batches of one rank, each of at most `micro_batch_size` rows and never empty."""
    if not rows:
        raise ValueError("a window has at least one row")
    ordered = sorted(rows, key=lambda row: len(row.token_ids))
    rounds = -(-len(ordered) // (micro_batch_size * world))
    pieces = rounds * world
    bounds = [len(ordered) * k // pieces for k in range(pieces + 1)]
    dealt = []
    for first in range(0, pieces, world):
        widest = max(bounds[k + 1] - bounds[k] for k in range(first, first + world))
        mine = ordered[bounds[first + rank] : bounds[first + rank + 1]]
        dealt.append(mine + [_idle(ordered[bounds[first]])] * (widest - len(mine)))
    return dealt


def _idle(row: Row) -> Row:
    n = len(row.token_ids)
    return replace(row, loss_mask=[0] * n, logprobs=[0.0] * n, fresh=[0] * n, advantage=0.0)


def padding(micro_batches: Sequence[Sequence[Row]]) -> float:
    """Share of padded positions, for reports."""
    padded = sum(len(micro) * max(len(row.token_ids) for row in micro) for micro in micro_batches)
    return 1.0 - sum(len(row.token_ids) for micro in micro_batches for row in micro) / padded


def collate(rows: Sequence[Row], pad_id: int, device: torch.device | str) -> dict[str, torch.Tensor]:
    """TRL's input dictionary for one micro-batch. B rows, P prompt positions, T the rest:

    prompt_ids, prompt_mask (B, P); completion_ids, completion_mask, tool_mask, sampling_per_token_logps, fresh
    (B, T); advantages (B,). `completion_mask` covers every real token, for it is the attention mask;
    `tool_mask` is the loss mask.
    """
    longest = max(len(row.token_ids) for row in rows)
    cut = min(longest - 1, *(row.prompt_length for row in rows))
    width = longest - cut

    def pad(values: Callable[[Row], Sequence[float]], fill: float, dtype: torch.dtype) -> torch.Tensor:
        tails = [list(values(row)[cut:]) for row in rows]
        padded = [tail + [fill] * (width - len(tail)) for tail in tails]
        return torch.tensor(padded, dtype=dtype, device=device)

    prompt_ids = torch.tensor([row.token_ids[:cut] for row in rows], dtype=torch.long, device=device)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": pad(lambda row: row.token_ids, pad_id, torch.long),
        "completion_mask": pad(lambda row: [1] * len(row.token_ids), 0, torch.long),
        "tool_mask": pad(lambda row: row.loss_mask, 0, torch.long),
        "sampling_per_token_logps": pad(lambda row: row.logprobs, 0.0, torch.float32),
        "fresh": pad(lambda row: row.fresh, 0, torch.long),
        "advantages": torch.tensor([row.advantage for row in rows], dtype=torch.float32, device=device),
    }


def loss_scale(loss: str, micro: Sequence[Row], window: Window, world: int) -> float:
    """Factor on TRL's loss of one micro-batch that makes the gradients of all of them, summed over a rank and
    averaged over ranks (as DDP does), the gradient of the window.

    TRL 1.16 (`GRPOTrainer._compute_loss`) divides by: grpo and dr_grpo the rows of the micro-batch, bnpo its
    tokens, dapo and cispo `num_items_in_batch / processes`. So bnpo, whose mean is over "the local batch", is
    here a mean over the whole window.
    """
    if loss in ("grpo", "dr_grpo"):
        return len(micro) * world / len(window.rows)
    if loss == "bnpo":
        return max(1, sum(sum(row.loss_mask) for row in micro)) * world / max(1, window.tokens)
    return 1.0
