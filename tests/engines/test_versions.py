"""What the embedded engine does with versions beyond what every engine must: families of models, retired adapters."""

from __future__ import annotations

import pytest
import torch

from infra.engines.protocol import BASE, Sampling
from tests.engines.test_contract_generation import check
from tests.engines.tiny_models import load, prompt, save_adapter, save_model

FREE = Sampling(temperature=1.0, max_new_tokens=10, stop_token_ids=())


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
async def test_after_an_update_outputs_are_those_of_the_new_weights(start, tmp_path, family, tied):
    old, new = (save_model(tmp_path / str(seed), family, tied, seed) for seed in (1, 2))
    engine = start(old)
    seeded = Sampling(1.0, 30, (), seed=4)
    before = await engine.generate(prompt(20), seeded, BASE, "a")
    await engine.prefetch(BASE, 1, new)
    await engine.update_weights(1, new)
    after = await engine.generate(prompt(20), seeded, BASE, "b")
    assert (before.token_ids != after.token_ids, after.version_spans, engine.versions()) == (True, [(0, 1)], {BASE: 1})
    check(after, prompt(20), load(new))


async def test_adapters_come_and_go_and_the_base_stays_bit_by_bit(start, base, tmp_path):
    engine = start()
    module = engine._loop._module
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for version in range(4):
        await engine.publish_adapter("ada", version, save_adapter(tmp_path / str(version), base, seed=version))
        await engine.generate(prompt(40), FREE, "ada", str(version))
    assert {len(stack.a) for stack in engine._loop.bank._stacks.values()} == {1}, "retired adapters leave their place"
    after = module.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(tensor, before[name]) for name, tensor in after.items())
