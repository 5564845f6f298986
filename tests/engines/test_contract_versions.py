"""What every engine must do when versions change: outputs, spans, prefixes, refusals."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from infra.engines.errors import BadRequest, BaseFrozen, UnknownPolicy, WeightMismatch
from infra.engines.protocol import BASE, Sampling
from tests.engines.test_contract_generation import check
from tests.engines.tiny_models import load, prompt, save_adapter, save_model, teacher_forced
from tests.engines.waiting import generated, until_generated

FREE = Sampling(temperature=1.0, max_new_tokens=10, stop_token_ids=())
LONG = 300


async def test_after_an_update_outputs_are_those_of_the_new_weights(engine, two_models):
    """Its embedding is tied to its head."""
    seeded = Sampling(1.0, 30, (), seed=4)
    before = await engine.generate(prompt(20), seeded, BASE, "a")
    await engine.prefetch(BASE, 1, two_models[1])
    await engine.update_weights(1, two_models[1])
    after = await engine.generate(prompt(20), seeded, BASE, "b")
    assert (before.token_ids != after.token_ids, after.version_spans, engine.versions()) == (True, [(0, 1)], {BASE: 1})
    check(after, prompt(20), load(two_models[1]))


async def test_no_stale_prefix_over_fifty_updates_of_a_shared_long_prompt(engine, two_models):
    models = [load(d) for d in two_models]
    shared = prompt(150)
    reused = (await engine.stats())["tokens_reused"]
    for version in range(1, 51):
        which = version % 2
        await engine.update_weights(version, two_models[which])
        first = await engine.generate(shared, Sampling(1.0, 3, ()), BASE, f"{version}")
        longer = shared + first.token_ids + [5]
        second = await engine.generate(longer, Sampling(1.0, 3, ()), BASE, f"{version}+")
        assert first.version_spans == second.version_spans == [(0, version)]
        check(first, shared, models[which])
        check(second, longer, models[which])
    # once per version and never across: up to the whole first turn, at the least the full blocks of the cache
    assert 50 * 128 <= (await engine.stats())["tokens_reused"] - reused <= 50 * 152


async def test_an_update_in_mid_generation_keeps_tokens_and_says_which_version_made_which(engine, two_models):
    models = [load(d) for d in two_models]
    prompts = [prompt(n, seed=n) for n in (4, 30, 17)]
    since = await generated(engine)
    flying = [
        asyncio.ensure_future(engine.generate(p, Sampling(0.7, LONG, ()), BASE, str(i))) for i, p in enumerate(prompts)
    ]
    await until_generated(engine, 12, since)
    await engine.update_weights(1, two_models[1])
    for p, result in zip(prompts, await asyncio.gather(*flying), strict=True):
        (start_0, v0), (switch, v1) = result.version_spans
        assert (start_0, v0, v1, len(result.token_ids)) == (0, 0, 1, LONG) and 0 < switch < LONG
        expected = teacher_forced(models[0], p, result.token_ids, 0.7)[:switch]
        expected += teacher_forced(models[1], p, result.token_ids, 0.7)[switch:]
        np.testing.assert_allclose(result.logprobs, expected, atol=2e-4)


async def test_adapter_updates_match_the_trainer_and_never_touch_the_base(engine, base, tmp_path):
    model, history = load(base), prompt(140)
    for version in range(6):
        adapter = save_adapter(tmp_path / str(version), base, seed=version)
        await engine.prefetch("ada", version, adapter)
        await engine.publish_adapter("ada", version, adapter)
        result = await engine.generate(history, FREE, "ada", str(version))
        assert result.version_spans == [(0, version)]
        check(result, history, load(base, adapter))
    base_result = await engine.generate(history, FREE, BASE, "base")
    assert base_result.version_spans == [(0, 0)]
    check(base_result, history, model)


async def test_in_flight_rows_of_one_tenant_switch_alone(engine, base, tmp_path):
    paths = [save_adapter(tmp_path / str(s), base, seed=s) for s in range(3)]
    await engine.publish_adapter("ada", 0, paths[0])
    await engine.publish_adapter("bob", 0, paths[1])
    since = await generated(engine)
    calls = (engine.generate(prompt(9), Sampling(1.0, LONG, ()), t, t) for t in ("ada", "bob", BASE))
    flying = [asyncio.ensure_future(call) for call in calls]
    await until_generated(engine, 30, since)
    await engine.publish_adapter("ada", 1, paths[2])
    ada, bob, plain = await asyncio.gather(*flying)
    assert [v for _, v in ada.version_spans] == [0, 1] and bob.version_spans == plain.version_spans == [(0, 0)]
    check(bob, prompt(9), load(base, paths[1]))
    check(plain, prompt(9), load(base))
    switch = ada.version_spans[1][0]
    expected = teacher_forced(load(base, paths[0]), prompt(9), ada.token_ids, 1.0)[:switch]
    expected += teacher_forced(load(base, paths[2]), prompt(9), ada.token_ids, 1.0)[switch:]
    np.testing.assert_allclose(ada.logprobs, expected, atol=1e-4)


async def test_tenants_are_refused_by_name(engine, base, tmp_path):
    adapter = save_adapter(tmp_path / "a", base, seed=0)
    with pytest.raises(BadRequest, match="tenant of its own"):
        await engine.publish_adapter(BASE, 1, adapter)
    await engine.publish_adapter("ada", 1, adapter)
    with pytest.raises(BaseFrozen, match="ada"):
        await engine.update_weights(1, base)
    with pytest.raises(UnknownPolicy, match="'bob' has no version loaded"):
        await engine.generate([1], FREE, "bob", "a")
    assert engine.versions() == {BASE: 0, "ada": 1}


@pytest.mark.parametrize("fault", ["missing", "shape", "extra", "tied", "empty", "garbage"])
async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(engine, base, tmp_path, fault):
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
async def test_adapters_that_do_not_fit_are_refused_and_the_old_one_stays(engine, base, tmp_path, first):
    good = save_adapter(tmp_path / "good", base, seed=1)
    bad = save_adapter(tmp_path / "bad", base, seed=2)
    tensors = load_file(bad / "adapter_model.safetensors")
    tensors.pop(next(iter(tensors)))
    save_file(tensors, bad / "adapter_model.safetensors")
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


async def test_a_tenant_that_is_withdrawn_is_served_no_more_and_leaves_the_others_alone(engine, base, tmp_path):
    adapters = [save_adapter(tmp_path / name, base, seed=seed) for seed, name in enumerate("ab")]
    for tenant, directory in zip("ab", adapters, strict=True):
        await engine.publish_adapter(tenant, 1, directory)
    await engine.prefetch("c", 1, adapters[0])
    assert {"a", "b", "c"} <= set(await engine.held()) and BASE not in await engine.held()
    await engine.withdraw_adapter("c")
    seeded = Sampling(1.0, 20, (), seed=4)
    before = await engine.generate(prompt(20), seeded, "b", "before")
    since = await generated(engine)
    flying = asyncio.ensure_future(engine.generate(prompt(9), Sampling(1.0, LONG, ()), "a", "flying"))
    await until_generated(engine, 3, since)
    await engine.withdraw_adapter("a")
    await engine.withdraw_adapter("a")
    assert (await flying).finish_reason == "abort" and engine.versions().keys() & {"a", "b"} == {"b"}
    assert set(await engine.held()) & {"a", "b", "c"} == {"b"}
    with pytest.raises(UnknownPolicy, match="'a' has no version"):
        await engine.generate(prompt(9), seeded, "a", "after")
    again = await engine.generate(prompt(20), seeded, "b", "again")
    assert again.token_ids == before.token_ids
    np.testing.assert_allclose(again.logprobs, before.logprobs, atol=1e-5)
