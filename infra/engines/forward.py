"""The forwards of the running rows: what rows lack is computed, and one more token of each is sampled.

Invariants
- Prefill computes all but a row's last token; the decode step computes the last one and samples: one path for
  prompts, for reused prefixes and for rows whose cache a weight update made invalid.
- Row n of the batch lies in slot n of the cache.
"""

from __future__ import annotations

from typing import Any

import torch

from infra.engines.adapters import AdapterBank
from infra.engines.kv import SlotCache
from infra.engines.sampling import draw, uniforms
from infra.engines.slots import Row

PREFILL_TOKENS = 4096
"""Padded tokens of one prefill forward; a longer prompt goes alone."""


class Forward:
    """Used by the engine's loop thread only."""

    def __init__(self, module: torch.nn.Module, cache: SlotCache, bank: AdapterBank):
        self._module, self._cache, self._bank = module, cache, bank
        self._device = next(module.parameters()).device
        self._dtype = next(module.parameters()).dtype

    def prefill(self, rows: list[Row]) -> int:
        """Cache all but the last token of every row, in padded batches of rows of like length; how many tokens that
        were."""
        lacking = [(len(r.tokens) - 1 - r.cached, at) for at, r in enumerate(rows)]
        todo = sorted((need, at) for need, at in lacking if need > 0)
        total = sum(need for need, _ in todo)
        while todo:
            take = max(1, PREFILL_TOKENS // todo[-1][0])
            chunk, todo = todo[-take:], todo[:-take]
            at = [at for _, at in chunk]
            self._prefill([rows[i] for i in at], [need for need, _ in chunk], at)
        return total

    def _prefill(self, rows: list[Row], needs: list[int], at: list[int]) -> None:
        width = max(needs)
        fresh = [
            r.tokens[r.cached : r.cached + need] + [0] * (width - need) for r, need in zip(rows, needs, strict=True)
        ]
        slots, need = self._tensor(at), self._tensor(needs)
        start = self._tensor([r.cached for r in rows])
        place = torch.arange(width, device=self._device)
        valid = place < need[:, None]
        # padding stands at the row's last new position: harmless, for it is neither written nor read
        position = start[:, None] + torch.minimum(place, need[:, None] - 1)
        write = (slots[:, None] * self._cache.capacity + position)[valid]
        length = max(r.cached + n for r, n in zip(rows, needs, strict=True))
        whole = at == list(range(at[0], at[0] + len(at)))
        self._cache.aim(slice(at[0], at[0] + len(at)) if whole else slots, length, write, valid)
        self._logits(rows, self._tensor(fresh), position, length)
        for row, n in zip(rows, needs, strict=True):
            row.cached += n

    def sample(self, rows: list[Row]) -> tuple[list[int], list[float]]:
        """One more token of every row, and its log-prob, which is not finite where the logits are not."""
        position = self._tensor([len(r.tokens) - 1 for r in rows])
        length = max(len(r.tokens) for r in rows)
        write = torch.arange(len(rows), device=self._device) * self._cache.capacity + position
        self._cache.aim(slice(0, len(rows)), length, write)
        last = self._tensor([[r.tokens[-1]] for r in rows])
        logits = self._logits(rows, last, position[:, None], length)
        u = uniforms([r.seed for r in rows], [len(r.logprobs) for r in rows])
        temperatures = torch.tensor([r.sampling.temperature for r in rows], device=self._device)
        tokens, logprobs = draw(logits, temperatures, torch.from_numpy(u).to(self._device))
        return tokens.tolist(), logprobs.tolist()

    def _logits(self, rows: list[Row], ids: torch.Tensor, position: torch.Tensor, length: int) -> torch.Tensor:
        """(rows, vocabulary) of the last query of `ids` (rows, queries)."""
        keys = torch.arange(length, device=self._device)
        mask = torch.zeros(len(rows), 1, ids.shape[1], length, dtype=self._dtype, device=self._device)
        mask.masked_fill_((keys > position[:, :, None])[:, None], float("-inf"))
        self._bank.route([row.tenant for row in rows])
        output = self._module(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position,
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _tensor(self, values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, device=self._device)
