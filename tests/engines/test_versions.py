"""Weight updates and adapters: what is served after a swap, spans, stale prefixes, refusals."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from infra.engines.errors import BadRequest, BaseFrozen, UnknownPolicy, WeightMismatch
from infra.engines.protocol import BASE, Generation, Sampling
from tests.engines.tiny_models import load, prompt, save_adapter, save_model, teacher_forced

FREE = Sampling(temperature=1.0, max_new_tokens=10, stop_token_ids=())


def check(result: Generation, context: list[int], model, temperature: float = 1.0) -> None:
    np.testing.assert_allclose(
        result.logprobs, teacher_forced(model, context, result.token_ids, temperature), atol=1e-4
    )


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


async def test_no_stale_prefix_over_fifty_updates_of_a_shared_long_prompt(start, base, tmp_path):
    directories = [base, save_model(tmp_path / "other", seed=9)]
    models = [load(d) for d in directories]
    engine, shared = start(), prompt(150)
    for version in range(1, 51):
        which = version % 2
        await engine.update_weights(version, directories[which])
        first = await engine.generate(shared, Sampling(1.0, 3, ()), BASE, f"{version}")
        longer = shared + first.token_ids + [5]
        second = await engine.generate(longer, Sampling(1.0, 3, ()), BASE, f"{version}+")
        assert first.version_spans == second.version_spans == [(0, version)]
        check(first, shared, models[which])
        check(second, longer, models[which])
    assert (await engine.stats())["tokens_reused"] == 50 * 152


async def until_generated(engine, count: int) -> None:
    async with asyncio.timeout(30):
        while (await engine.stats())["tokens_generated"] < count:
            await asyncio.sleep(0)


async def test_an_update_in_mid_generation_keeps_tokens_and_says_which_version_made_which(start, base, tmp_path):
    new = save_model(tmp_path / "new", seed=2)
    engine, models = start(), {0: load(base), 1: load(new)}
    prompts = [prompt(n, seed=n) for n in (4, 30, 17)]
    flying = [
        asyncio.ensure_future(engine.generate(p, Sampling(0.7, 400, ()), BASE, str(i))) for i, p in enumerate(prompts)
    ]
    await until_generated(engine, 12)
    await engine.update_weights(1, new)
    for p, result in zip(prompts, await asyncio.gather(*flying), strict=True):
        (start_0, v0), (switch, v1) = result.version_spans
        assert (start_0, v0, v1, len(result.token_ids)) == (0, 0, 1, 400) and 0 < switch < 400
        expected = teacher_forced(models[0], p, result.token_ids, 0.7)[:switch]
        expected += teacher_forced(models[1], p, result.token_ids, 0.7)[switch:]
        np.testing.assert_allclose(result.logprobs, expected, atol=2e-4)


async def test_adapters_and_base_mixed_in_one_batch_equal_each_alone(start, base, tmp_path):
    adapters = {
        name: save_adapter(tmp_path / name, base, seed, rank)
        for seed, (name, rank) in enumerate([("ada", 4), ("bob", 8)])
    }
    engine = start(max_batch=12)
    models = {BASE: load(base)} | {name: load(base, path) for name, path in adapters.items()}
    for name, path in adapters.items():
        await engine.publish_adapter(name, 3, path)
    tenants = [BASE, "ada", "bob", "ada", BASE, "bob", "bob"]
    jobs = [(prompt(5 + 3 * i, seed=i), Sampling(0.7, 12, (), seed=i), t) for i, t in enumerate(tenants)]
    mixed = await asyncio.gather(*(engine.generate(*job, f"m{i}") for i, job in enumerate(jobs)))
    for i, (job, result) in enumerate(zip(jobs, mixed, strict=True)):
        alone = await engine.generate(*job, f"a{i}")
        assert alone.token_ids == result.token_ids
        assert result.version_spans == [(0, 0 if job[2] == BASE else 3)]
        check(result, job[0], models[job[2]], 0.7)


async def test_adapter_updates_match_the_trainer_and_never_touch_the_base(start, base, tmp_path):
    engine, model = start(), load(base)
    history = prompt(40)
    for version in range(6):
        adapter = save_adapter(tmp_path / str(version), base, seed=version)
        await engine.publish_adapter("ada", version, adapter)
        result = await engine.generate(history, FREE, "ada", str(version))
        assert result.version_spans == [(0, version)]
        check(result, history, load(base, adapter))
    base_result = await engine.generate(history, FREE, BASE, "base")
    check(base_result, history, model)
    layer = engine._loop._module.model.layers[0].mlp.up_proj
    assert len(layer.lora_A) == 1, "retired adapters are deleted"


async def test_in_flight_rows_of_one_tenant_switch_alone(start, base, tmp_path):
    paths = [save_adapter(tmp_path / str(s), base, seed=s) for s in range(3)]
    engine = start()
    await engine.publish_adapter("ada", 0, paths[0])
    await engine.publish_adapter("bob", 0, paths[1])
    ada, bob = (asyncio.ensure_future(engine.generate(prompt(9), Sampling(1.0, 200, ()), t, t)) for t in ("ada", "bob"))
    await until_generated(engine, 6)
    await engine.publish_adapter("ada", 1, paths[2])
    ada_result, bob_result = await ada, await bob
    assert [v for _, v in ada_result.version_spans] == [0, 1] and bob_result.version_spans == [(0, 0)]
    check(bob_result, prompt(9), load(base, paths[1]))
    switch = ada_result.version_spans[1][0]
    expected = teacher_forced(load(base, paths[2]), prompt(9), ada_result.token_ids, 1.0)
    np.testing.assert_allclose(ada_result.logprobs[switch:], expected[switch:], atol=1e-4)


async def test_tenants_are_refused_by_name(start, base, tmp_path):
    engine = start()
    with pytest.raises(UnknownPolicy, match="'ada' has no version loaded"):
        await engine.generate([1], FREE, "ada", "a")
    adapter = save_adapter(tmp_path / "a", base, seed=0)
    with pytest.raises(BadRequest, match="tenant of its own"):
        await engine.publish_adapter(BASE, 1, adapter)
    await engine.publish_adapter("ada", 1, adapter)
    with pytest.raises(BaseFrozen, match="ada"):
        await engine.update_weights(1, base)
    assert engine.versions() == {BASE: 0, "ada": 1}


@pytest.mark.parametrize("fault", ["missing", "shape", "extra", "tied", "empty", "garbage"])
async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(start, base, tmp_path, fault):
    new = save_model(tmp_path / "new", seed=5)
    file = new / "model.safetensors"
    tensors = load_file(file)
    match fault:
        case "missing":
            del tensors["model.norm.weight"]
        case "shape":
            tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
        case "extra":
            tensors["model.surprise.weight"] = tensors["model.norm.weight"].clone()
        case "tied":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, file)
    if fault == "empty":
        file.unlink()
    if fault == "garbage":
        file.write_bytes(b"\x80\x04not safetensors")
    engine = start()
    with pytest.raises(
        WeightMismatch, match={"empty": "no .*safetensors", "garbage": "not readable"}.get(fault, "tensor")
    ):
        await engine.update_weights(1, new)
    result = await engine.generate(prompt(8), FREE, BASE, "a")
    assert result.version_spans == [(0, 0)]
    check(result, prompt(8), load(base))
    await engine.update_weights(1, save_model(tmp_path / "good", seed=5))
    assert engine.versions() == {BASE: 1}


@pytest.mark.parametrize("first", [True, False])
async def test_adapters_that_do_not_fit_are_refused_and_the_old_one_stays(start, base, tmp_path, first):
    good = save_adapter(tmp_path / "good", base, seed=1)
    bad = save_adapter(tmp_path / "bad", base, seed=2)
    tensors = load_file(bad / "adapter_model.safetensors")
    tensors.pop(next(iter(tensors)))
    save_file(tensors, bad / "adapter_model.safetensors")
    engine = start()
    if not first:
        await engine.publish_adapter("ada", 1, good)
    with pytest.raises(WeightMismatch, match="missing"):
        await engine.publish_adapter("ada", 2, bad)
    check(await engine.generate(prompt(8), FREE, BASE, "b"), prompt(8), load(base))
    if first:
        with pytest.raises(UnknownPolicy):
            await engine.generate(prompt(8), FREE, "ada", "a")
        await engine.publish_adapter("ada", 2, good)
    result = await engine.generate(prompt(8), FREE, "ada", "c")
    check(result, prompt(8), load(base, good))


async def test_no_tenant_gets_a_prefix_of_another(start, base, tmp_path):
    adapters = {name: save_adapter(tmp_path / name, base, seed) for seed, name in enumerate(["ada", "bob"])}
    models = {BASE: load(base)} | {name: load(base, path) for name, path in adapters.items()}
    engine, shared = start(), prompt(80)
    for name, path in adapters.items():
        await engine.publish_adapter(name, 1, path)
    for tenant in ("ada", "bob", BASE, "ada"):
        longer = [*shared, 7]
        check(await engine.generate(shared, FREE, tenant, tenant), shared, models[tenant])
        check(await engine.generate(longer, FREE, tenant, tenant), longer, models[tenant])
