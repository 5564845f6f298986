"""Fitting adapters to a model: the next version of one is fitted as the first was, and what does not fit is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import Qwen3Config, Qwen3ForCausalLM

from infra.engines.errors import WeightMismatch
from infra.engines.fitting import AdapterFiles, Fitting


def model() -> Any:
    config = Qwen3Config(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, max_position_embeddings=32,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def files(seed: int, **options: Any) -> AdapterFiles:
    torch.manual_seed(seed)
    config = LoraConfig(**{"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]} | options)
    adapted = get_peft_model(model(), config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    return AdapterFiles(config, dict(get_peft_model_state_dict(adapted)))


def test_the_next_version_is_fitted_without_asking_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = Fitting(model())
    fitting.fit(files(1))
    asked = files(2)
    anew = Fitting(model()).fit(asked)
    monkeypatch.setattr(Fitting, "_planned", lambda *_: pytest.fail("it asked PEFT again"))
    again = fitting.fit(asked)
    assert again.keys() == anew.keys() and len(again) == 4
    for path, product in again.items():
        torch.testing.assert_close(product.a @ product.b, anew[path].a @ anew[path].b, rtol=0, atol=0)
        a, b = (asked.tensors[f"base_model.model.{path}.lora_{which}.weight"] for which in "AB")
        torch.testing.assert_close(product.a @ product.b, (3.0 * b @ a).t())


def test_what_is_like_a_known_one_but_does_not_fit_is_refused() -> None:
    fitting = Fitting(model())
    fitting.fit(files(1))
    wide = files(2)
    name = next(iter(wide.tensors))
    with pytest.raises(WeightMismatch, match="does not fit"):
        fitting.fit(AdapterFiles(wide.config, wide.tensors | {name: torch.zeros(3, 3)}))
    without = {key: value for key, value in wide.tensors.items() if key != name}
    with pytest.raises(WeightMismatch, match="missing"):
        fitting.fit(AdapterFiles(wide.config, without))
    assert fitting.fit(wide)
    assert len(fitting.fit(files(3, target_modules=["q_proj"]))) == 2, "another kind beside it"
    scaled = fitting.fit(files(3, lora_alpha=2))
    plain = fitting.fit(files(3))
    path = next(iter(plain))
    torch.testing.assert_close(3 * scaled[path].a @ scaled[path].b, plain[path].a @ plain[path].b)
