"""LoRA adapters of many tenants on one base, mixed in one batch.

PEFT reads the configuration and shapes the modules. The forward of its layers is replaced by one that takes the
rows of each adapter from a routing prepared once per batch, where PEFT's own `adapter_names` path searches them
anew in every layer (peft/tuners/lora/layer.py, `_mixed_batch_forward`; the arithmetic is the same).

Invariants
- The base's tensors are never written: no adapter is merged.
- Every version has a name of its own; a name is deleted when nothing in flight uses it.
- A row without an adapter gets exactly the base's output.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, set_peft_model_state_dict
from peft.tuners.lora import Linear, LoraLayer

from infra.engines.errors import WeightMismatch
from infra.engines.weights import Tensors, read_tensors


@dataclass(frozen=True)
class AdapterFiles:
    """One adapter directory in memory."""

    config: LoraConfig
    tensors: Tensors

    @classmethod
    def read(cls, directory: Path) -> AdapterFiles:
        """Raises WeightMismatch for anything that is not a plain LoRA adapter."""
        try:
            kind = json.loads((directory / "adapter_config.json").read_text())["peft_type"]
            if kind != "LORA":
                raise WeightMismatch(f"{directory}: an adapter of type {kind}; only LORA is served")
            config = LoraConfig.from_pretrained(str(directory))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightMismatch(f"{directory}: no readable adapter_config.json: {error}") from error
        for option in ("use_dora", "modules_to_save", "alora_invocation_tokens", "trainable_token_indices"):
            if getattr(config, option, None):
                raise WeightMismatch(f"{directory}: adapter option {option} is not served")
        if config.bias != "none":
            raise WeightMismatch(f"{directory}: adapter option bias={config.bias!r} is not served")
        config.inference_mode = True
        return cls(config, read_tensors(directory, "adapter_model*.safetensors"))


class AdapterBank:
    """The adapters on one module. Used by the engine's loop thread only."""

    def __init__(self, module: torch.nn.Module):
        self._module = module
        self._peft: PeftModel | None = None
        self._groups: list[tuple[str, torch.Tensor | None]] = []

    def add(self, name: str, files: AdapterFiles) -> None:
        """Load an adapter under a new name. Raises WeightMismatch and leaves the others as they were."""
        if self._peft is None:
            self._peft = PeftModel(self._module, files.config, adapter_name=name)
        else:
            self._peft.add_adapter(name, files.config)
        try:
            result = set_peft_model_state_dict(self._peft, dict(files.tensors), adapter_name=name)
            marker = f".{name}."
            if missing := [k for k in result.missing_keys if marker in k]:
                raise WeightMismatch(f"adapter {name}: tensor {missing[0]} is missing in the files")
            if result.unexpected_keys:
                raise WeightMismatch(f"adapter {name}: tensor {result.unexpected_keys[0]} has no place in the model")
            for path, layer in self._layers():
                if type(layer) is not Linear or name in layer.lora_variant:
                    raise WeightMismatch(f"adapter {name}: {path} is not a plain linear layer")
        except (WeightMismatch, RuntimeError, ValueError) as error:
            self.remove(name)
            if isinstance(error, WeightMismatch):
                raise
            raise WeightMismatch(f"adapter {name} does not fit the model: {error}") from error
        self._peft.set_adapter(name, inference_mode=True)  # deleting the active one makes PEFT warn
        self._peft.eval()
        self._peft.requires_grad_(False)
        for _, layer in self._layers():
            layer.forward = partial(_forward, layer, self)

    def remove(self, name: str) -> None:
        """Drop an adapter that no row uses any more."""
        assert self._peft is not None
        self._peft.delete_adapter(name)

    def route(self, names: Sequence[str | None]) -> None:
        """Set the adapter of each row of the next forward; None is the base."""
        if self._peft is None:
            return
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            if name is not None:
                rows.setdefault(name, []).append(row)
        device = self._module.device
        self._groups = [
            (name, None if len(members) == len(names) else torch.tensor(members, device=device))
            for name, members in rows.items()
        ]

    def _layers(self) -> list[tuple[str, Any]]:
        assert self._peft is not None
        return [(path, m) for path, m in self._peft.named_modules() if isinstance(m, LoraLayer)]


def _forward(layer: Any, bank: AdapterBank, x: torch.Tensor) -> torch.Tensor:
    """`base(x) + scaling * B(A(x))`, each row with its own A, B and scaling; x is (rows, queries, width)."""
    result = layer.base_layer(x)
    for name, rows in bank._groups:
        if name not in layer.lora_A:
            continue
        a, b = layer.lora_A[name], layer.lora_B[name]
        mine = (x if rows is None else x.index_select(0, rows)).to(a.weight.dtype)
        delta = (b(a(mine)) * layer.scaling[name]).to(result.dtype)
        result = result + delta if rows is None else result.index_add(0, rows, delta)
    return result
