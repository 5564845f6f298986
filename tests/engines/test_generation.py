"""What the embedded engine samples: parity with plain transformers, ends, seeds, refusals."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch

from infra.engines.errors import (
    EngineClosed,
    ModelUnusable,
    NonFiniteLogits,
)
from infra.engines.protocol import BASE, Sampling
from infra.engines.sampling import draw, uniforms
from tests.engines.tiny_models import load, prompt, save_model, teacher_forced

FREE = Sampling(temperature=1.0, max_new_tokens=12, stop_token_ids=())


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_equal_plain_transformers(start, tmp_path, family, tied, temperature):
    directory = save_model(tmp_path / "m", family, tied, seed=3)
    engine, plain = start(directory), load(directory)
    prompts = [prompt(n, seed=n) for n in (1, 2, 7, 40, 41, 3, 97, 12, 5, 60, 33)]
    sampling = Sampling(temperature, 14, (), None)
    results = await asyncio.gather(*(engine.generate(p, sampling, BASE, str(i)) for i, p in enumerate(prompts)))
    for p, result in zip(prompts, results, strict=True):
        assert (len(result.token_ids), result.finish_reason, result.version_spans) == (14, "length", [(0, 0)])
        np.testing.assert_allclose(result.logprobs, teacher_forced(plain, p, result.token_ids, temperature), atol=1e-4)


async def test_tokens_equal_plain_transformers_at_the_same_uniforms(start, base):
    engine, plain = start(), load(base)
    result = await engine.generate(prompt(9), Sampling(1.0, 20, (), seed=77), BASE, "a")
    tokens = prompt(9)
    for position in range(20):
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([tokens])).logits[:, -1]
        token, _ = draw(logits, torch.ones(1), torch.from_numpy(uniforms([77], [position])))
        tokens.append(int(token))
    assert result.token_ids == tokens[9:]


async def test_a_seed_decides_whatever_the_batch(start):
    engine = start()
    seeded = Sampling(1.0, 16, (), seed=5)
    alone = await engine.generate(prompt(10), seeded, BASE, "alone")
    others = [engine.generate(prompt(n, seed=9), FREE, BASE, f"o{n}") for n in range(3, 20)]
    among, *_ = await asyncio.gather(engine.generate(prompt(10), seeded, BASE, "among"), *others)
    assert among.token_ids == alone.token_ids
    np.testing.assert_allclose(among.logprobs, alone.logprobs, atol=1e-4)
    other = await engine.generate(prompt(10), Sampling(1.0, 16, (), seed=6), BASE, "other")
    assert other.token_ids != alone.token_ids


def test_draws_follow_the_distribution_and_never_take_an_impossible_token():
    logits = torch.tensor([2.0, float("-inf"), 0.0, 1.0, float("-inf")])
    n = 40_000
    u = uniforms(range(n), [7] * n)
    assert u.min() > 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.01
    neighbours = uniforms([3] * n, range(n))
    assert abs(np.corrcoef(neighbours[:-1], neighbours[1:])[0, 1]) < 0.02
    tokens, logprobs = draw(logits.expand(n, 5), torch.full((n,), 0.5), torch.from_numpy(u))
    expected = torch.softmax(logits / 0.5, dim=-1)
    np.testing.assert_allclose(torch.bincount(tokens, minlength=5) / n, expected, atol=0.01)
    torch.testing.assert_close(logprobs, expected.log()[tokens])
    edge, _ = draw(logits.expand(2, 5), torch.ones(2), torch.tensor([1e-13, 1 - 1e-13], dtype=torch.float64))
    assert edge.tolist() == [0, 3]


async def test_deterministic_mode_is_bitwise_independent_of_the_order_of_arrival(start, base):
    jobs = [(prompt(n, seed=n), Sampling(0.9, 10 + n % 4, (), seed=n)) for n in range(2, 14)]
    outcomes = []
    for order in (range(12), reversed(range(12)), [*range(6, 12), *range(6)]):
        engine = start(deterministic=True)
        keys = list(order)
        results = await asyncio.gather(*(engine.generate(*jobs[i], BASE, str(i)) for i in keys))
        outcomes.append({i: (r.token_ids, r.logprobs) for i, r in zip(keys, results, strict=True)})
    assert outcomes[0] == outcomes[1] == outcomes[2]


async def test_a_model_with_a_missing_tensor_is_refused(start, tmp_path):
    from safetensors.torch import load_file, save_file

    directory = save_model(tmp_path / "m")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnusable, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        start(directory)


async def test_a_later_turn_reuses_its_prefix_and_only_its_tenant_may(start, base):
    engine, plain = start(), load(base)
    history = prompt(50)
    first = await engine.generate(history, FREE, BASE, "1")
    history = history + first.token_ids + prompt(7)
    second = await engine.generate(history, FREE, BASE, "2")
    assert (await engine.stats())["tokens_reused"] == 50 + 11
    np.testing.assert_allclose(second.logprobs, teacher_forced(plain, history, second.token_ids, 1.0), atol=1e-4)
    changed = [*history[:-20], *prompt(20, seed=4)]
    third = await engine.generate(changed, FREE, BASE, "3")
    np.testing.assert_allclose(third.logprobs, teacher_forced(plain, changed, third.token_ids, 1.0), atol=1e-4)


async def test_long_sequences_take_slots_from_others_and_all_stay_right(start, base, monkeypatch):
    monkeypatch.setattr("infra.engines.hf.CPU_CACHE_BYTES", 2 * 2 * 2 * 32 * 4 * 700)
    engine, plain = start(), load(base)
    assert engine.max_length == 640
    prompts = [prompt(n, seed=n) for n in (20, 30, 240, 25, 300, 8, 50)]
    results = await asyncio.gather(
        *(engine.generate(p, Sampling(1.0, 30, ()), BASE, str(i)) for i, p in enumerate(prompts))
    )
    for p, result in zip(prompts, results, strict=True):
        np.testing.assert_allclose(result.logprobs, teacher_forced(plain, p, result.token_ids, 1.0), atol=1e-4)
    assert (await engine.stats())["preempted"] > 0


async def test_a_diverged_policy_fails_its_requests_and_poisons_nobody(start, base, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = save_model(tmp_path / "m", seed=0)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.weight"].fill_(float("nan"))
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    engine, plain = start(max_batch=2), load(base)
    await engine.update_weights(1, broken)
    for i in range(4):
        with pytest.raises(NonFiniteLogits, match="version 1"):
            await engine.generate(prompt(30), FREE, BASE, str(i))
    await engine.update_weights(2, base)
    results = await asyncio.gather(*(engine.generate(prompt(n), FREE, BASE, str(n)) for n in (3, 5, 40, 4)))
    for n, result in zip((3, 5, 40, 4), results, strict=True):
        np.testing.assert_allclose(result.logprobs, teacher_forced(plain, prompt(n), result.token_ids, 1.0), atol=1e-4)


async def test_a_dead_loop_answers_everybody_with_the_cause(start, monkeypatch):
    engine = start()
    await engine.pause()
    waiting = [asyncio.ensure_future(engine.generate(prompt(5), FREE, BASE, str(i))) for i in range(3)]
    await asyncio.sleep(0)

    def explode(*_: object) -> None:
        raise ZeroDivisionError("the ceiling fell down")

    monkeypatch.setattr(engine._loop, "_decode", explode)
    await engine.resume()
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, EngineClosed) and "ZeroDivisionError: the ceiling fell down" in str(error)
    assert not await engine.health()
    with pytest.raises(EngineClosed, match="ceiling"):
        await engine.generate(prompt(5), FREE, BASE, "late")
    with pytest.raises(EngineClosed, match="ceiling"):
        await engine.pause()


async def test_a_request_that_arrives_while_the_loop_ends_is_answered(start):
    engine, gate = start(), threading.Event()
    engine._loop.call(gate.wait)
    engine._loop.close()
    request = asyncio.ensure_future(engine.generate(prompt(5), FREE, BASE, "a"))
    await asyncio.sleep(0)
    gate.set()
    async with asyncio.timeout(10):
        with pytest.raises(EngineClosed, match="closed"):
            await request
