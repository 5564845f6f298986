"""A copy of what a version consists of, in host memory, so that training can go on while it is published.

Invariants
- A snapshot does not change when the model does. It is good until the next `take`, which uses the same memory: there
  is one at a time.
- The hash of a version is over the trained weights only, in the order of their names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


def trained(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The trained parameters, by name, in the order of their names."""
    return sorted((name, p) for name, p in model.named_parameters() if p.requires_grad)


def weights_sha256(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hash over names and bytes of trained weights, in their order by name."""
    digest = hashlib.sha256()
    for name, tensor in weights:
        digest.update(name.encode() + b"\0")
        digest.update(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Snapshot:
    """One version."""

    version: int
    weights: dict[str, torch.Tensor]
    """The trained parameters by name, in the order of their names."""
    moments: dict[str, torch.Tensor] | None
    """`{parameter}|{slot}` -> the optimizer's state, empty before the first step; None: weights only."""
    scheduler: dict[str, Any] | None = None

    @property
    def full(self) -> bool:
        """Whether training can be resumed from it."""
        return self.moments is not None

    @property
    def sha256(self) -> str:
        return weights_sha256(self.weights.items())


class Snapshots:
    """Takes one after the other."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def take(
        self,
        version: int,
        model: torch.nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        full: bool = True,
    ) -> Snapshot:
        """Copies now. Without optimizer and scheduler: nothing was optimized yet."""
        weights = {name: self._copy(name, parameter) for name, parameter in trained(model)}
        moments: dict[str, torch.Tensor] | None = {} if full else None
        rates = None
        if moments is not None and optimizer is not None and scheduler is not None:
            for name, parameter in trained(model):
                for slot, value in optimizer.state[parameter].items():
                    key = f"{name}|{slot}"
                    moments[key] = self._copy(key, torch.as_tensor(value))
            whole = scheduler.state_dict()
            rates = {k: whole[k] for k in ("base_lrs", "last_epoch", "_step_count", "_last_lr")}
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies from a GPU are on their way
        return Snapshot(version, weights, moments, rates)

    def _copy(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        kept = self._memory.get(key)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._memory[key] = kept
        return kept.copy_(tensor, non_blocking=tensor.is_cuda)
