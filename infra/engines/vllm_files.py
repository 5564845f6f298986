"""Looking at a version's files before a server reads them, for a server swaps without looking and in steps.

Invariants: only headers are read; a directory that passes fits the base by every name and shape, so that a server that
reads it either serves it whole or fails for a reason that lies in itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from infra.engines.errors import ModelUnusable, WeightMismatch

Shapes = Mapping[str, tuple[int, ...]]
# vLLM serves some of these otherwise than PEFT does, without a word
_REFUSED = (
    "use_dora",
    "modules_to_save",
    "alora_invocation_tokens",
    "trainable_token_indices",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "exclude_modules",
)
_HEAD = "lm_head.weight"


class BaseModel:
    """The model that a server serves. Raises ModelUnusable."""

    def __init__(self, directory: Path):
        try:
            config = json.loads((directory / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise ModelUnusable(f"{directory}: no readable config.json there: {error}") from error
        self.vocabulary: int = config["vocab_size"]
        self.tied: bool = config.get("tie_word_embeddings", False)
        try:
            self.shapes = shapes(directory)
        except WeightMismatch as error:
            raise ModelUnusable(str(error)) from error

    def check_weights(self, directory: Path) -> None:
        """Raises WeightMismatch, naming the tensor."""
        new = dict(shapes(directory))
        if self.tied and _HEAD in new and _HEAD not in self.shapes:
            embedding = next((name for name in self.shapes if name.endswith("embed_tokens.weight")), None)
            if embedding is None or not _equal(directory, _HEAD, embedding):
                raise WeightMismatch(f"tensor {_HEAD} is tied to {embedding} in the model, but differs from it here")
            del new[_HEAD]
        for name, shape in new.items():
            if name not in self.shapes:
                raise WeightMismatch(f"tensor {name} of the new weights is not in the model")
            if shape != self.shapes[name]:
                raise WeightMismatch(f"tensor {name} has shape {shape}, the model's is {self.shapes[name]}")
        if missing := self.shapes.keys() - new.keys():
            raise WeightMismatch(f"tensor {min(missing)} of the model is not in the new weights")

    def check_adapter(self, directory: Path, max_rank: int) -> None:
        """Raises WeightMismatch for all but a plain LoRA adapter that covers the layers which it names."""
        config = _adapter_config(directory)
        rank, targets = config["r"], config["target_modules"]
        if rank > max_rank:
            raise WeightMismatch(f"{directory}: rank {rank}; the server was started for {max_rank} at most")
        found = dict(shapes(directory, "adapter_model*.safetensors"))
        for name, shape in self.shapes.items():
            layer = name.removesuffix(".weight")
            if layer == name or not _targeted(layer, targets):
                continue
            for part, wanted in (("lora_A", (rank, shape[1])), ("lora_B", (shape[0], rank))):
                tensor = f"base_model.model.{layer}.{part}.weight"
                if (got := found.pop(tensor, None)) is None:
                    raise WeightMismatch(f"{directory}: tensor {tensor} is missing in the files")
                if got != wanted:
                    raise WeightMismatch(f"{directory}: tensor {tensor} has shape {got}, the model wants {wanted}")
        if found:
            raise WeightMismatch(f"{directory}: tensor {min(found)} has no place in the model")


def shapes(directory: Path, pattern: str = "*.safetensors") -> Shapes:
    """Names and shapes of all tensors. Raises WeightMismatch when there is none or a file is broken."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob(pattern)):
        try:
            with safe_open(file, "np") as opened:
                tensors = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise WeightMismatch(f"{file}: not readable as safetensors: {error}") from error
        if twice := found.keys() & tensors.keys():
            raise WeightMismatch(f"{file}: tensor {min(twice)} is in two files")
        found |= tensors
    if not found:
        raise WeightMismatch(f"{directory}: no {pattern} there")
    return found


def warm(directory: Path) -> None:
    """Read all files once, so that the swap reads them from memory."""
    buffer = bytearray(1 << 22)
    for file in directory.glob("*.safetensors"):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def _adapter_config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / "adapter_config.json").read_text())
        kind, _, _ = config["peft_type"], config["r"], config["target_modules"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightMismatch(f"{directory}: no readable adapter_config.json: {error}") from error
    if kind != "LORA":
        raise WeightMismatch(f"{directory}: an adapter of type {kind}; only LORA is served")
    for option in _REFUSED:
        if config.get(option):
            raise WeightMismatch(f"{directory}: adapter option {option} is not served")
    if config.get("bias", "none") != "none":
        raise WeightMismatch(f"{directory}: adapter option bias={config['bias']!r} is not served")
    return config


def _targeted(layer: str, targets: str | list[str]) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, layer) is not None
    return any(layer == target or layer.endswith(f".{target}") for target in targets)


def _equal(directory: Path, one: str, other: str) -> bool:
    """Whether two tensors of a directory are the same, bit by bit."""
    from safetensors.torch import load_file  # tensors of bfloat16 are read by torch alone

    tensors: dict[str, Any] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return other in tensors and bool((tensors[one] == tensors[other]).all())
