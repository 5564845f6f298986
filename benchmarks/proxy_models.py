"""Models and adapters of `benchmarks.proxy`: random weights, for speed does not depend on what they say."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.proxy_traffic import Shape
from infra.models.tiny import write_tiny
from rl.config.model import TinySection

CALCULATOR = Shape(prompt=16, turns=4, answer=6, observation=8)
"""As the demo's trajectories."""
LARGER = Shape(prompt=64, turns=3, answer=32, observation=24)
RANK = 16
MIB = 1 << 20


def save_larger(directory: Path) -> None:
    """13 million parameters, with the demo's tokenizer."""
    write_tiny(TinySection(hidden_size=384, layers=8), 0, directory)


def save_adapters(work: Path, base: Path, number: int) -> list[Path]:
    """PEFT directories of different adapters on all linear layers."""
    found = []
    for seed in range(number):
        torch.manual_seed(seed)
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.02)
        found.append(work / f"adapter{seed}")
        model.save_pretrained(found[-1])
    return found


def swap_model(directory: Path, mib: int, seed: int) -> Path:
    """About so many MiB, with the demo's tokenizer beside it."""
    write_tiny(TinySection(hidden_size=64, layers=1), seed, directory)
    (directory / "model.safetensors").unlink()
    torch.manual_seed(seed)
    hidden = 512
    config = Qwen3Config(
        vocab_size=1000, hidden_size=hidden, intermediate_size=4 * hidden, num_attention_heads=8,
        num_key_value_heads=8, head_dim=64, num_hidden_layers=max(1, mib * MIB // (40 * hidden**2)),
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory
