"""From a PEFT directory to the products that the engine adds to its linear layers.

PEFT itself says which layers an adapter has, of which shape and scale: it is loaded into a copy of the model that has
no memory (torch's meta device). So nothing of the served model is touched until an adapter is known to fit.

Invariant: what does not fit, or would be served differently from PEFT, is refused with the name of the culprit.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class LowRank:
    """What one layer gets: `x @ a @ b`, with the scale in b."""

    a: torch.Tensor
    """(in, rank)"""
    b: torch.Tensor
    """(rank, out)"""


Adapter = Mapping[str, LowRank]
"""By the path of the layer in the model."""


class Fitting:
    """Fits adapters to one model. Thread-safe; may be slow, and needs no lock of the engine's."""

    def __init__(self, module: Any):
        self._kind, self._config = type(module), module.config
        self._device = module.device
        # half-precision bases get adapters in single precision, as PEFT does
        self._dtype = torch.float32 if module.dtype in (torch.bfloat16, torch.float16) else module.dtype
        self._lock = threading.Lock()
        self._peft: PeftModel | None = None
        self._serial = 0

    def fit(self, files: AdapterFiles) -> Adapter:
        """The adapter on the model's device. Raises WeightMismatch, naming the tensor, layer or option."""
        with self._lock, torch.no_grad():
            self._serial += 1
            name = f"fitted{self._serial}"
            try:
                return self._fit(name, files)
            except (RuntimeError, ValueError) as error:
                raise WeightMismatch(f"the adapter does not fit the model: {error}") from error
            except KeyError as error:
                raise WeightMismatch(f"tensor {error} is missing in the adapter's files") from error
            finally:
                if self._peft is not None and name in self._peft.peft_config:
                    self._peft.delete_adapter(name)

    def _fit(self, name: str, files: AdapterFiles) -> Adapter:
        if self._peft is None or not self._peft.peft_config:
            with torch.device("meta"):
                copy = self._kind(self._config)
            self._peft = PeftModel(copy, files.config, adapter_name=name, low_cpu_mem_usage=True)
        else:
            self._peft.add_adapter(name, files.config, low_cpu_mem_usage=True)
        result = set_peft_model_state_dict(
            self._peft, dict(files.tensors), adapter_name=name, low_cpu_mem_usage=True
        )
        marker = f".{name}."
        if missing := [key for key in result.missing_keys if marker in key]:
            raise WeightMismatch(f"tensor {missing[0].replace(marker, '.')} is missing in the adapter's files")
        if result.unexpected_keys:
            raise WeightMismatch(f"tensor {result.unexpected_keys[0]} of the adapter has no place in the model")
        base = self._peft.get_base_model()
        return {
            path: self._low_rank(path, layer, name, files.tensors)
            for path, layer in base.named_modules()
            if isinstance(layer, LoraLayer) and name in (*layer.lora_A, *layer.lora_embedding_A)
        }

    def _low_rank(self, path: str, layer: Any, name: str, tensors: Tensors) -> LowRank:
        if type(layer) is not Linear or name in layer.lora_variant:
            raise WeightMismatch(f"{path} is not a plain linear layer; its adapter is not served")
        a, b = (tensors[f"base_model.model.{path}.lora_{which}.weight"] for which in "AB")
        place = {"device": self._device, "dtype": self._dtype}
        return LowRank(a.t().to(**place).contiguous(), (b.to(**place) * layer.scaling[name]).t().contiguous())
