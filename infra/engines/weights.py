"""Reading a version's safetensors and making them the weights of a live module.

    read -> verify -> stage (beside the served weights, on their device)     while the module is at work
    exchange                                                                 between two tokens: no byte is copied

Invariants: files are verified completely, by name and shape, before the module changes; every tensor of the module is
covered; tied tensors stay one storage. Staged weights are copies: nothing served depends on a file. No pickle is ever
read.
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
        self._tied: dict[str, list[torch.Tensor]] = {}
        owners: dict[tuple[int, tuple[int, ...]], str] = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            owner = owners.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
            if owner == name:
                self._tensors[name] = tensor
            else:
                self._aliases[name] = owner
                self._tied.setdefault(owner, []).append(tensor)

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

    def stage(self, verified: Tensors) -> dict[str, torch.Tensor]:
        """Copies of what `verify` returned, on the module's device and in its precision. Where the device has no room
        for a second set of weights, they stay where they are, and `exchange` copies them."""
        staged = {}
        for name, tensor in verified.items():
            like = self._tensors[name]
            try:
                staged[name] = tensor.to(like.device, like.dtype, copy=True, memory_format=torch.contiguous_format)
            except torch.OutOfMemoryError:
                return dict(verified)
        return staged

    def exchange(self, staged: Tensors) -> None:
        """Make what `stage` returned the weights; it must not be used for anything else."""
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in staged.items():
                target = self._tensors[name]
                if (tensor.device, tensor.dtype) != (target.device, target.dtype):
                    target.copy_(tensor)
                    continue
                for tied in (target, *self._tied.get(name, ())):
                    tied.data = tensor
