"""Hardware and language models as typed data (`sim/data`), each with where its numbers come from.

Invariants: nothing here is fitted; what is fitted to published runs is in `sim.config.Efficiency`.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Annotated

import yaml
from pydantic import Field

from rl.config.base import Section
from rl.errors import ConfigError

BYTES = 2
"""Of a parameter and of a cached key or value: bf16."""

Positive = Annotated[float, Field(gt=0)]


class Hardware(Section):
    """One device."""

    name: str
    flops: Positive
    """Dense bf16 operations per second, at their peak."""
    memory: Positive
    """Bytes."""
    bandwidth: Positive
    """Bytes per second, to its own memory."""
    price: Positive
    """Per device and hour, in units of one H20."""
    priced: str
    """When the price was looked at."""
    source: str


class LanguageModel(Section):
    """A transformer, as far as its speed goes."""

    name: str
    parameters: Positive
    active: Positive | None = None
    """Parameters that one token passes through; None is all of them."""
    layers: Annotated[int, Field(ge=1)]
    heads: Annotated[int, Field(ge=1)]
    kv_heads: Annotated[int, Field(ge=1)]
    head_dim: Annotated[int, Field(ge=1)]
    experts: Annotated[int, Field(ge=1)] = 1
    experts_per_token: Annotated[int, Field(ge=1)] = 1

    @property
    def touched(self) -> float:
        """Parameters that one token passes through."""
        return self.active or self.parameters

    @property
    def weight_bytes(self) -> float:
        return self.parameters * BYTES

    @property
    def kv_bytes(self) -> float:
        """Cache of one token."""
        return 2.0 * self.layers * self.kv_heads * self.head_dim * BYTES

    @property
    def token_flops(self) -> float:
        """Of one token's forward pass, attention apart."""
        return 2.0 * self.touched

    @property
    def attention_flops(self) -> float:
        """Of one token's attention to one earlier token."""
        return 4.0 * self.layers * self.heads * self.head_dim


@cache
def hardware_profiles() -> dict[str, Hardware]:
    return {chip.name: chip for chip in map(Hardware.model_validate, _read("hardware.yaml"))}


@cache
def model_profiles() -> dict[str, LanguageModel]:
    return {model.name: model for model in map(LanguageModel.model_validate, _read("models.yaml"))}


def hardware(name: str) -> Hardware:
    """The profile of this name. Raises ConfigError, which names those that there are."""
    found = hardware_profiles().get(name)
    if found is None:
        raise ConfigError(f"hardware {name!r} is unknown; sim/data/hardware.yaml has {', '.join(hardware_profiles())}")
    return found


def language_model(name: str) -> LanguageModel:
    """The profile of this name. Raises ConfigError, which names those that there are."""
    found = model_profiles().get(name)
    if found is None:
        raise ConfigError(f"model {name!r} is unknown; sim/data/models.yaml has {', '.join(model_profiles())}")
    return found


def _read(name: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = yaml.safe_load((files("sim") / "data" / name).read_text())
    return rows
