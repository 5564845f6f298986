"""The optimizer of the warm start: Muon for the hidden matrices, AdamW for everything else.

Muon orthogonalises the momentum of each matrix (Jordan et al., 2024), here torch's own; its updates are scaled
to the size of AdamW's (Liu et al., 2025, arXiv:2502.16982), so that one learning rate serves both. A
from-scratch tiny model leaves the plateau before its first success with about a fifth of the episodes that
AdamW alone needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WEIGHT_DECAY = 0.01


class MuonAdamW(torch.optim.Optimizer):
    """Both under the interface of one, without a stored state: for runs that start over when they fail."""

    def __init__(self, model: torch.nn.Module, lr: float):
        head = {id(p) for e in (model.get_input_embeddings(), model.get_output_embeddings()) for p in e.parameters()}
        trained = [p for p in model.parameters() if p.requires_grad]
        hidden = [p for p in trained if p.dim() == 2 and id(p) not in head]
        others = [p for p in trained if p.dim() != 2 or id(p) in head]
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(hidden, lr=lr, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY),
        ]
        super().__init__([{"params": hidden}, {"params": others}], {"lr": lr})
        # the very same groups, so that a schedule set here reaches the parts
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        assert closure is None
        for part in self._parts:
            part.step()
