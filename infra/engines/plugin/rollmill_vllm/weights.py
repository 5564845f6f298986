"""Weights of a whole model from a directory of safetensors, for vLLM's weight-transfer routes.

    init_weight_transfer_engine -> (start_weight_update -> update_weights {"path": ...} -> finish_weight_update)*

Invariants
- Only safetensors are read, never pickle, and only below the root that was named at the start.
- All files are opened before the first weight changes; a directory without any is refused.
- On a CPU vLLM multiplies by packed copies of the weights. The copy of a head that is tied to the embedding is not
  packed again by a reload: it is here, and then compared with the weights themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)


@dataclass
class Root(WeightTransferInitInfo):
    root: str
    """Directory below which all weights lie."""


@dataclass
class Directory(WeightTransferUpdateInfo):
    path: str
    """Directory of safetensors files, named as a Hugging Face checkpoint names its tensors."""


class FileWeights(WeightTransferEngine[Root, Directory]):
    """One worker's side. Each worker reads the files itself and takes its own shard."""

    init_info_cls = Root
    update_info_cls = Directory
    supports_draft_weight_update = False
    _root: Path | None = None

    def init_transfer_engine(self, init_info: Root) -> None:
        self._root = Path(init_info.root).resolve(strict=True)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Directory) -> None:
        directory = Path(update_info.path).resolve(strict=True)
        if self._root is None or not directory.is_relative_to(self._root):
            raise ValueError(f"{directory} is not below {self._root}, from where weights may be read")
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{directory}: no safetensors there")
        with ExitStack() as stack:
            opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
            self.model.load_weights(_tensors(opened))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._pack_heads()

    def shutdown(self) -> None:
        self._root = None

    def _pack_heads(self) -> None:
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

        for name, head in self.model.named_modules():
            if isinstance(head, ParallelLMHead) and isinstance(head.quant_method, UnquantizedEmbeddingMethod):
                dispatch_cpu_unquantized_gemm(head, remove_weight=False)
                _compare(name, head)


def _tensors(files: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        for name in file.keys():  # noqa: SIM118  it is no mapping
            yield name, file.get_tensor(name)


def _compare(name: str, head: Any) -> None:
    """Raises RuntimeError if the packed head is another than its weights."""
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(4, head.weight.shape[1], generator=generator).to(head.weight.dtype)
    packed = head.quant_method.apply(head, probe).float()
    plain = torch.nn.functional.linear(probe.float(), head.weight.float())
    tolerance = 1e-3 if head.weight.dtype == torch.float32 else 5e-2
    error = ((packed - plain).abs().max() / plain.abs().max().clamp(min=1e-6)).item()
    if not error <= tolerance:
        raise RuntimeError(f"{name}: its packed copy is not that of its weights (relative error {error:.3g})")
