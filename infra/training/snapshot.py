"""A copy of what a version consists of, in host memory, so that training can go on while it is published.

Invariants
- A snapshot does not change when the model does. It is good until the next `take`, which uses the same memory: there
  is one at a time.
- The hash of a version is over the trained weights only, in the order of their names.
- Names do not tell under which name an adapter is held in memory, nor what is held beside it: an adapter that is
  trained among others is the same, and has the same hash, as one that is trained alone.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

ADAPTER = "default"
"""What an adapter is called in the names of its weights, here and in the store."""


def trained(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The trained parameters, by name, in the order of their names: of several adapters those of the active one."""
    found = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if isinstance(model, PeftModel):
        held = str(model.active_adapter)
        found = [(_named(name, held), p) for name, p in found]
    return sorted(found)


def _named(name: str, held: str, new: Sequence[str] = (ADAPTER,)) -> str:
    """`new` in the place of `held`: in `...q_proj.lora_A.{held}.weight`, of embeddings in
    `...embed_tokens.lora_embedding_A.{held}`."""
    parts = name.split(".")
    at = next((len(parts) - back for back in (1, 2) if parts[-back:][0] == held), len(parts))
    return ".".join([*parts[:at], *(new if at < len(parts) else ()), *parts[at + 1 :]])


def unnamed(name: str) -> str:
    """A name of `trained` as PEFT has it in an adapter's file: without the adapter's."""
    return _named(name, ADAPTER, ())


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
    adapter: LoraConfig | None = None
    """What `weights` are an adapter of; None where they are the whole model's."""

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
        adapter = copy.deepcopy(model.active_peft_config) if isinstance(model, PeftModel) else None
        return Snapshot(version, weights, moments, rates, adapter)

    def _copy(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        kept = self._memory.get(key)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._memory[key] = kept
        return kept.copy_(tensor, non_blocking=tensor.is_cuda)
