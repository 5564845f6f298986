"""What the embedded engine does with versions beyond what every engine must: families of models, retired adapters."""

from __future__ import annotations

import pytest
import torch

from infra.engines.protocol import BASE, Sampling
from infra.engines.weights import WeightTarget
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
    module = engine._loop._forward._module
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for version in range(4):
        await engine.publish_adapter("ada", version, save_adapter(tmp_path / str(version), base, seed=version))
        await engine.generate(prompt(40), FREE, "ada", str(version))
    assert {len(stack.a) for stack in engine._loop.bank._stacks.values()} == {1}, "retired adapters leave their place"
    after = module.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(tensor, before[name]) for name, tensor in after.items())


async def test_what_was_prefetched_does_not_depend_on_its_files(start, base, tmp_path):
    engine, new = start(), save_model(tmp_path / "new", seed=2)
    expected = load(save_model(tmp_path / "same", seed=2))
    await engine.prefetch(BASE, 1, new)
    with (new / "model.safetensors").open("r+b") as file:  # as a cache that is reused would
        file.seek(-4096, 2)
        file.write(b"\0" * 4096)
    await engine.update_weights(1, new)
    check(await engine.generate(prompt(9), FREE, BASE, "a"), prompt(9), expected)


def test_weights_without_room_beside_the_served_ones_are_copied_into_them(base, tmp_path):
    module, new = load(base), load(save_model(tmp_path / "new", seed=2))
    target = WeightTarget(module)
    places = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    target.exchange({name: tensor.double() for name, tensor in target.verify(new.state_dict()).items()})
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, new.state_dict()[name]) and tensor.data_ptr() == places[name]
    assert module.lm_head.weight is module.model.embed_tokens.weight
