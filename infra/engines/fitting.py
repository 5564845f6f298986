"""From a PEFT directory to the products that the engine adds to its linear layers.

PEFT itself says which layers an adapter has, of which shape and scale: it is loaded into a copy of the model that has
no memory (torch's meta device). So nothing of the served model is touched until an adapter is known to fit. What PEFT
said is kept: the next version of an adapter has equal options and shapes, and is not asked about again.

Invariant: what does not fit, or would be served differently from PEFT, is refused with the name of the culprit.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, set_peft_model_state_dict
from peft.tuners.lora import Linear, LoraLayer

from infra.engines.errors import WeightMismatch
from infra.engines.weights import Tensors, read_tensors

PLANS = 256
"""Kinds of adapters that are remembered."""


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


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the tensors of an adapter belong, for all adapters of equal options and shapes."""

    shapes: Mapping[str, torch.Size]
    scales: Mapping[str, float]
    """By the path of the layer."""

    def suits(self, tensors: Tensors) -> bool:
        return {name: tensor.shape for name, tensor in tensors.items()} == self.shapes


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
        self._plans: OrderedDict[str, Plan] = OrderedDict()

    def fit(self, files: AdapterFiles) -> Adapter:
        """The adapter on the model's device. Raises WeightMismatch, naming the tensor, layer or option."""
        options = json.dumps(files.config.to_dict(), sort_keys=True, default=_plain)
        with self._lock, torch.no_grad():
            plan = self._plans.get(options)
            if plan is None or not plan.suits(files.tensors):
                plan = self._plans[options] = self._planned(files)
            self._plans.move_to_end(options)
            while len(self._plans) > PLANS:
                self._plans.popitem(last=False)
            return {path: self._low_rank(path, scale, files.tensors) for path, scale in plan.scales.items()}

    def _planned(self, files: AdapterFiles) -> Plan:
        """What PEFT says."""
        self._serial += 1
        name = f"fitted{self._serial}"
        try:
            return Plan({name: t.shape for name, t in files.tensors.items()}, self._scales(name, files))
        except (RuntimeError, ValueError) as error:
            raise WeightMismatch(f"the adapter does not fit the model: {error}") from error
        except KeyError as error:
            raise WeightMismatch(f"tensor {error} is missing in the adapter's files") from error
        finally:
            if self._peft is not None and name in self._peft.peft_config:
                self._peft.delete_adapter(name)

    def _scales(self, name: str, files: AdapterFiles) -> dict[str, float]:
        if self._peft is None or not self._peft.peft_config:
            with torch.device("meta"):
                copy = self._kind(self._config)
            self._peft = PeftModel(copy, files.config, adapter_name=name, low_cpu_mem_usage=True)
        else:
            self._peft.add_adapter(name, files.config, low_cpu_mem_usage=True)
        result = set_peft_model_state_dict(self._peft, dict(files.tensors), adapter_name=name, low_cpu_mem_usage=True)
        marker = f".{name}."
        if missing := [key for key in result.missing_keys if marker in key]:
            raise WeightMismatch(f"tensor {missing[0].replace(marker, '.')} is missing in the adapter's files")
        if result.unexpected_keys:
            raise WeightMismatch(f"tensor {result.unexpected_keys[0]} of the adapter has no place in the model")
        base = self._peft.get_base_model()
        return {
            path: _scale(path, layer, name, files.tensors)
            for path, layer in base.named_modules()
            if isinstance(layer, LoraLayer) and name in (*layer.lora_A, *layer.lora_embedding_A)
        }

    def _low_rank(self, path: str, scale: float, tensors: Tensors) -> LowRank:
        a, b = _factors(path, tensors)
        place = {"device": self._device, "dtype": self._dtype}
        return LowRank(a.t().to(**place).contiguous(), (b.to(**place) * scale).t().contiguous())


def _scale(path: str, layer: Any, name: str, tensors: Tensors) -> float:
    if type(layer) is not Linear or name in layer.lora_variant:
        raise WeightMismatch(f"{path} is not a plain linear layer; its adapter is not served")
    _factors(path, tensors)
    return float(layer.scaling[name])


def _factors(path: str, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Raises KeyError."""
    return tensors[f"base_model.model.{path}.lora_A.weight"], tensors[f"base_model.model.{path}.lora_B.weight"]


def _plain(value: Any) -> Any:
    """Of the options what JSON does not know: sets, enumerations, dtypes."""
    return sorted(value) if isinstance(value, set) else str(value)
