"""Small random models on disk, and what a plain transformers forward says of them."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 61
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
}


def save_model(directory: Path, family: str = "qwen3", tied: bool = True, seed: int = 0) -> Path:
    """A model directory; different seeds give very different policies. Heads of 32 are the least that vLLM computes on
    a CPU."""
    torch.manual_seed(seed)
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=tied))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(directory)
    return directory


def save_adapter(directory: Path, base: Path, seed: int, rank: int = 4) -> Path:
    """A PEFT directory whose effect is large."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    return directory


def load(base: Path, adapter: Path | None = None) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return (model if adapter is None else PeftModel.from_pretrained(model, adapter)).eval()


@torch.no_grad()
def teacher_forced(model: torch.nn.Module, prompt: list[int], answer: list[int], temperature: float) -> list[float]:
    """The log-prob of each token of the answer after temperature, by one plain forward."""
    logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0].float() / temperature
    table = torch.log_softmax(logits, dim=-1)
    return [table[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer)]


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
