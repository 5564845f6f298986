"""Reading a version's safetensors and copying them into a live module.

Invariants: files are verified completely, by name and shape, before the first byte of the module changes; every
tensor of the module is covered; tied tensors are one storage and are written once. No pickle is ever read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from infra.engines.errors import WeightMismatch

Tensors = Mapping[str, torch.Tensor]


def read_tensors(directory: Path, pattern: str = "*.safetensors") -> dict[str, torch.Tensor]:
    """All tensors of a directory's safetensors files. Raises WeightMismatch when there is none or it is broken."""
    files = sorted(directory.glob(pattern))
    if not files:
        raise WeightMismatch(f"{directory}: no {pattern} there")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            loaded = load_file(file)
        except (OSError, SafetensorError) as error:
            raise WeightMismatch(f"{file}: not readable as safetensors: {error}") from error
        if twice := tensors.keys() & loaded.keys():
            raise WeightMismatch(f"{file}: tensor {min(twice)} is in two files")
        tensors.update(loaded)
    return tensors


class WeightTarget:
    """The tensors of a module as they were named when it was loaded, whatever is wrapped around it later."""

    def __init__(self, module: torch.nn.Module):
        self._tensors: dict[str, torch.Tensor] = {}
        self._aliases: dict[str, str] = {}
        owners: dict[tuple[int, tuple[int, ...]], str] = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            owner = owners.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
            if owner == name:
                self._tensors[name] = tensor
            else:
                self._aliases[name] = owner

    def verify(self, source: Tensors) -> dict[str, torch.Tensor]:
        """The tensors to copy, by canonical name. Raises WeightMismatch, naming the tensor."""
        chosen: dict[str, torch.Tensor] = {}
        for name, tensor in source.items():
            owner = self._aliases.get(name, name)
            target = self._tensors.get(owner)
            if target is None:
                raise WeightMismatch(f"tensor {name} of the new weights is not in the model")
            if target.shape != tensor.shape:
                raise WeightMismatch(
                    f"tensor {name} has shape {tuple(tensor.shape)}, the model's is {tuple(target.shape)}"
                )
            if owner in chosen and not torch.equal(chosen[owner], tensor):
                raise WeightMismatch(
                    f"tensor {name} is tied to {owner} in the model, but differs from it in the new weights"
                )
            chosen[owner] = tensor
        if missing := self._tensors.keys() - chosen.keys():
            raise WeightMismatch(f"tensor {min(missing)} of the model is not in the new weights")
        return chosen

    @torch.no_grad()
    def copy(self, verified: Tensors) -> None:
        """Copy what `verify` returned, in place."""
        for name, tensor in verified.items():
            self._tensors[name].copy_(tensor)
