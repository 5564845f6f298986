"""Adapters (PEFT) of one run, or of many tenants, on one frozen base.

Invariants
- The base is never written: adapters are added beside it, trained, taken away, and never merged.
- A new adapter is a function of its run's configuration and the base alone: not of the adapters beside it, nor of the
  order in which they came. Its zero initialisation leaves the policy equal to the base.
- One adapter is active, and only its weights have `requires_grad`.
"""

from __future__ import annotations

from itertools import count

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel, set_seed

from infra.training.snapshot import ADAPTER, weights_sha256
from rl.config.model import LoraSection
from rl.config.run import RunConfig
from rl.errors import ConfigError


class AdapterUnusable(ConfigError):
    """An adapter that the base can not carry."""


def plain(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The model itself, without what PEFT wraps around it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def activate(model: PeftModel, name: str) -> None:
    """Make this adapter the one that is used and trained; costs a walk over all modules, where another one was."""
    if model.active_adapter != name:
        model.set_adapter(name)


def policy_of(base: PreTrainedModel, config: RunConfig) -> PreTrainedModel | PeftModel:
    """What a run of its own trains: the whole model, or an adapter on it. Raises AdapterUnusable."""
    return base if config.model.lora is None else Adapters(base).add(config, ADAPTER)


class Adapters:
    """Several, side by side, of different ranks and targets. Belongs to one thread."""

    def __init__(self, base: PreTrainedModel) -> None:
        base.requires_grad_(False)
        self._base = base
        self._model: PeftModel | None = None
        self._numbers = count()

    @property
    def base_sha256(self) -> str:
        """Of every weight of the base, whatever adapters there are."""
        weights = {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in self._base.state_dict().items()
            if ".lora_" not in name
        }
        return weights_sha256(sorted(weights.items()))

    def add(self, config: RunConfig, name: str | None = None) -> PeftModel:
        """A new adapter, which is the active one now. Raises AdapterUnusable."""
        assert config.model.lora is not None
        name = name or f"adapter{next(self._numbers)}"
        set_seed(config.seed % 2**32)
        try:
            if self._model is None:
                self._model = get_peft_model(self._base, _peft(config.model.lora), adapter_name=name)
            else:
                self._model.add_adapter(name, _peft(config.model.lora))
        except (ValueError, NotImplementedError) as error:
            raise AdapterUnusable(f"model.lora: the base can not carry this adapter: {error}") from error
        self._model.set_adapter(name)
        return self._model

    def remove(self, name: str) -> None:
        """Forget an adapter and its weights."""
        assert self._model is not None
        others = [other for other in self._model.peft_config if other != name]
        if others:
            self._model.set_adapter(others[0])  # PEFT warns of one that is deleted while it is active
            self._model.delete_adapter(name)
        else:
            self._base, self._model = self._model.unload(), None


def _peft(section: LoraSection) -> LoraConfig:
    """PEFT's form of `model.lora`."""
    modules = section.target_modules
    return LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=modules if isinstance(modules, str) else list(modules),
        task_type="CAUSAL_LM",
    )
