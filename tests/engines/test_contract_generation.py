"""What every engine must do: log-probs of plain transformers, ends, refusals, adapters side by side."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from infra.engines.errors import BadRequest, PromptTooLong, UnknownPolicy
from infra.engines.protocol import BASE, Generation, Sampling
from tests.engines.tiny_models import VOCABULARY, load, prompt, save_adapter, teacher_forced
from tests.engines.waiting import generated, until_generated

FREE = Sampling(temperature=1.0, max_new_tokens=12, stop_token_ids=())


def check(result: Generation, context: list[int], model, temperature: float = 1.0) -> None:
    expected = teacher_forced(model, context, result.token_ids, temperature)
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_equal_plain_transformers(engine, base, temperature):
    plain = load(base)
    prompts = [prompt(n, seed=n) for n in (1, 2, 7, 40, 41, 3, 97, 12, 5, 60, 33)]
    sampling = Sampling(temperature, 14, (), None)
    results = await asyncio.gather(*(engine.generate(p, sampling, BASE, str(i)) for i, p in enumerate(prompts)))
    for p, result in zip(prompts, results, strict=True):
        assert (len(result.token_ids), result.finish_reason, result.version_spans) == (14, "length", [(0, 0)])
        check(result, p, plain, temperature)


async def test_a_seed_decides_and_none_is_never_the_same_twice(engine):
    seeded = Sampling(1.0, 16, (), seed=5)
    others = [engine.generate(prompt(n, seed=9), FREE, BASE, f"o{n}") for n in range(3, 9)]
    among, *_ = await asyncio.gather(engine.generate(prompt(10), seeded, BASE, "among"), *others)
    alone = await engine.generate(prompt(10), seeded, BASE, "alone")
    assert among.token_ids == alone.token_ids
    free = [await engine.generate(prompt(10), Sampling(1.0, 16, ()), BASE, str(i)) for i in range(3)]
    assert len({tuple(result.token_ids) for result in free}) == 3


async def test_ends(engine):
    long = await engine.generate(prompt(6), Sampling(1.0, 30, (), seed=1), BASE, "a")
    stop = long.token_ids[11]
    first = long.token_ids.index(stop)
    stopped = await engine.generate(prompt(6), Sampling(1.0, 30, (stop,), seed=1), BASE, "b")
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", long.token_ids[: first + 1])
    full = await engine.generate(prompt(636), Sampling(1.0, 30, (), seed=1), BASE, "c")
    assert (full.finish_reason, len(full.token_ids)) == ("length", 4)


async def test_refusals_name_what_is_wrong(engine):
    with pytest.raises(UnknownPolicy, match="'ada' has no version loaded"):
        await engine.generate([1], FREE, "ada", "a")
    with pytest.raises(PromptTooLong, match=r"640 tokens; a sequence has 640"):
        await engine.generate([1] * 640, FREE, BASE, "a")
    for tokens, sampling, text in [
        ([], FREE, "token_ids is empty"),
        ([1, VOCABULARY], FREE, r"vocabulary is 0\.\.60"),
        ([-1], FREE, "vocabulary"),
        ([1], Sampling(0.0, 5, ()), "temperature"),
        ([1], Sampling(float("nan"), 5, ()), "temperature"),
        ([1], Sampling(1.0, 0, ()), "max_new_tokens"),
    ]:
        with pytest.raises(BadRequest, match=text):
            await engine.generate(tokens, sampling, BASE, "a")
    assert await engine.health()


async def test_cancelling_the_call_frees_the_slot(engine):
    since = await generated(engine)
    calls = [engine.generate(prompt(4), Sampling(1.0, 600, ()), BASE, str(i)) for i in range(16)]
    flying = [asyncio.ensure_future(call) for call in calls]  # as many as the engine has places, at least
    await until_generated(engine, 20, since)
    for call in flying:
        call.cancel()
    await asyncio.gather(*flying, return_exceptions=True)
    assert len((await engine.generate(prompt(4), Sampling(1.0, 3, ()), BASE, "b")).token_ids) == 3
    async with asyncio.timeout(30):
        while (stats := await engine.stats())["running"] or stats["waiting"]:
            await asyncio.sleep(0)
    assert await generated(engine) - since < 16 * 600


async def test_adapters_and_base_mixed_in_one_batch_equal_each_alone(engine, base, tmp_path):
    adapters = {
        name: save_adapter(tmp_path / name, base, seed, rank)
        for seed, (name, rank) in enumerate([("ada", 4), ("bob", 8)])
    }
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


async def test_no_tenant_gets_a_prefix_of_another(engine, base, tmp_path):
    adapters = {name: save_adapter(tmp_path / name, base, seed) for seed, name in enumerate(["ada", "bob"])}
    models = {BASE: load(base)} | {name: load(base, path) for name, path in adapters.items()}
    shared = prompt(180)  # longer than a block of the cache
    for name, path in adapters.items():
        await engine.publish_adapter(name, 1, path)
    for tenant in ("ada", "bob", BASE, "ada"):
        longer = [*shared, 7]
        check(await engine.generate(shared, FREE, tenant, tenant), shared, models[tenant])
        check(await engine.generate(longer, FREE, tenant, tenant), longer, models[tenant])
