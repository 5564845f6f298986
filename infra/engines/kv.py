"""The key-value cache of a running batch: one slot per sequence, each with a length of its own.

Invariants
- The cache never decides what a query may see: the explicit 4D mask of the caller does.
- Unwritten positions hold finite numbers, so that a masked position contributes exactly nothing.
- Layout (layer, key|value, slot, position, head, dim): a run of slots is a view, so decoding the slots
  0..n-1 copies nothing but the new position.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, PretrainedConfig

BLOCK = 256
"""Positions by which the cache grows, at least; it doubles."""


class SlotCache(Cache):
    """`aim` says which slots and positions the next forward writes; `update` is called by the layers."""

    def __init__(self, config: PretrainedConfig, slots: int, dtype: torch.dtype, device: torch.device):
        super().__init__(layers=[])
        heads = config.num_attention_heads
        self._layers = config.num_hidden_layers
        self._heads = getattr(config, "num_key_value_heads", None) or heads
        self._dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.slots = slots
        self.capacity = 0
        self._kv = torch.zeros(self._shape(slots, 0), dtype=dtype, device=device)

    def _shape(self, slots: int, positions: int) -> tuple[int, ...]:
        return (self._layers, 2, slots, positions, self._heads, self._dim)

    @property
    def position_bytes(self) -> int:
        """Bytes of one position of one slot over all layers."""
        return self._layers * 2 * self._heads * self._dim * self._kv.element_size()

    def grown(self, positions: int) -> int:
        """The capacity that `grow(positions)` would give."""
        capacity = max(self.capacity, BLOCK)
        while capacity < positions:
            capacity *= 2
        return capacity

    def grow(self, capacity: int, slots: int) -> None:
        """Hold `capacity` positions in each of `slots` slots; contents of the surviving slots are kept."""
        kept = min(slots, self.slots)
        grown = torch.zeros(self._shape(slots, capacity), dtype=self._kv.dtype, device=self._kv.device)
        if self.capacity:
            grown[:, :, :kept, : self.capacity] = self._kv[:, :, :kept]
        self._kv, self.capacity, self.slots = grown, capacity, slots

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot onto another."""
        self._kv[:, :, target, :length] = self._kv[:, :, source, :length]

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` positions of two slots."""
        kept = self._kv[:, :, a, :length].clone()
        self._kv[:, :, a, :length] = self._kv[:, :, b, :length]
        self._kv[:, :, b, :length] = kept

    def clear(self, slot: int) -> None:
        """Forget a slot that may hold numbers that are not finite."""
        self._kv[:, :, slot] = 0

    def aim(
        self, rows: slice | torch.Tensor, length: int, write: torch.Tensor, valid: torch.Tensor | None = None
    ) -> None:
        """Prepare a forward over the slots `rows` that attends to positions below `length`.

        `write` (m,) are flat places `slot * capacity + position` of the new entries in row-major order of
        (row, query); `valid` (b, q) drops the padding among them, None means that there is none.
        """
        self._rows, self._length, self._write, self._valid = rows, length, write, valid

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new (b, head, q, dim) states and return all visible (b, head, length, dim)."""
        visible = []
        for states, store in zip((key_states, value_states), self._kv[layer_idx], strict=True):
            new = states.transpose(1, 2)
            new = new.flatten(0, 1) if self._valid is None else new[self._valid]
            store.flatten(0, 1).index_copy_(0, self._write, new)
            visible.append(store[self._rows, : self._length].transpose(1, 2))
        return visible[0], visible[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length
