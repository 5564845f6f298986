"""What every engine must do when it is paused, aborted and updated: nothing is lost, doubled or left waiting."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from infra.engines.errors import EngineClosed, WeightMismatch
from infra.engines.hf import HFEngine
from infra.engines.protocol import BASE, Sampling
from tests.engines.tiny_models import load, prompt, save_adapter, teacher_forced
from tests.engines.waiting import generated, until_generated

LONG = Sampling(temperature=1.0, max_new_tokens=400, stop_token_ids=())
SWAPS = {"hf": 1000, "vllm": 100}
"""vLLM's each take tens of milliseconds."""


async def test_abort_gives_partials_with_their_logprobs(engine, base):
    since = await generated(engine)
    flying = {str(i): asyncio.ensure_future(engine.generate(prompt(9, seed=i), LONG, BASE, str(i))) for i in range(3)}
    await until_generated(engine, 9, since)
    await engine.abort(["0", "2", "unknown"])
    for key in ("0", "2"):
        result = await flying[key]
        assert result.finish_reason == "abort" and 0 < len(result.token_ids) < 400
        expected = teacher_forced(load(base), prompt(9, seed=int(key)), result.token_ids, 1.0)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
    assert len((await flying["1"]).token_ids) == 400


async def test_pause_keep_holds_and_resume_goes_on(engine, base):
    since = await generated(engine)
    flying = asyncio.ensure_future(engine.generate(prompt(9), LONG, BASE, "a"))
    await until_generated(engine, 5, since)
    await engine.pause("keep")
    await engine.pause("keep")
    count = await generated(engine)
    late = asyncio.ensure_future(engine.generate(prompt(3), LONG, BASE, "late"))
    for _ in range(50):
        await engine.abort([])  # a round trip through the loop
        await engine.health()  # or to the server
    assert await generated(engine) == count and not flying.done()
    await engine.resume()
    await engine.resume()
    result = await flying
    np.testing.assert_allclose(result.logprobs, teacher_forced(load(base), prompt(9), result.token_ids, 1.0), atol=1e-4)
    assert (await late).finish_reason == "length"


async def test_pause_abort_ends_what_is_in_flight_and_later_requests_wait(engine):
    since = await generated(engine)
    flying = [asyncio.ensure_future(engine.generate(prompt(4), LONG, BASE, str(i))) for i in range(20)]
    await until_generated(engine, 4, since)
    await engine.pause("abort")
    results = await asyncio.gather(*flying)
    assert [r.finish_reason for r in results] == ["abort"] * 20
    assert all(bool(r.token_ids) == bool(r.version_spans) for r in results) and any(r.token_ids for r in results)
    assert results[19].token_ids == []  # there was no place for it
    late = asyncio.ensure_future(engine.generate(prompt(4), Sampling(1.0, 3, ()), BASE, "late"))
    await engine.abort([])
    await engine.health()
    assert not late.done()
    await engine.resume()
    assert len((await late).token_ids) == 3


async def test_a_failed_update_leaves_pause_and_resume_paired(engine, tmp_path):
    since = await generated(engine)
    flying = asyncio.ensure_future(engine.generate(prompt(4), LONG, BASE, "a"))
    await until_generated(engine, 1, since)
    for version in range(1, 6):
        await engine.pause()
        try:
            with pytest.raises(WeightMismatch):
                await engine.update_weights(version, tmp_path)
        finally:
            await engine.resume()
    assert (await flying).version_spans == [(0, 0)]


async def test_close_ends_requests_in_flight(engine):
    await engine.pause()
    request = asyncio.ensure_future(engine.generate(prompt(5), LONG, BASE, "a"))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineClosed, match="closed"):
        await request
    with pytest.raises(EngineClosed, match="closed"):
        await engine.resume()
    await engine.close()


@pytest.mark.parametrize("seed", range(4))
async def test_any_interleaving_keeps_the_invariants(engine, two_models, seed):
    """Every request ends exactly once; spans are ascending and every token's log-prob is that of the version
    which the span names; nothing stays in a slot."""
    rng = random.Random(seed)
    models = [load(path) for path in two_models]
    flying: dict[str, tuple[list[int], Sampling, asyncio.Future]] = {}
    histories: list[list[int]] = [prompt(n, seed=seed) for n in (3, 20, 60)]
    version, paused = 0, False
    for n in range(120):
        match rng.choices(["submit", "abort", "pause", "resume", "update", "cancel", "wait"], [40, 5, 5, 8, 8, 2, 30])[
            0
        ]:
            case "submit":
                context = list(rng.choice(histories))
                sampling = Sampling(rng.choice([1.0, 0.7]), rng.randint(1, 12), (rng.randrange(61),))
                flying[str(n)] = (
                    context,
                    sampling,
                    asyncio.ensure_future(engine.generate(context, sampling, BASE, str(n))),
                )
            case "abort":
                await engine.abort(rng.sample(sorted(flying), min(2, len(flying))))
            case "pause":
                await engine.pause("keep" if rng.random() < 0.7 else "abort")
                paused = True
            case "resume":
                await engine.resume()
                paused = False
            case "update":
                version += 1
                await engine.update_weights(version, two_models[version % 2])
            case "cancel":
                for key in rng.sample(sorted(flying), min(1, len(flying))):
                    flying.pop(key)[2].cancel()
            case "wait" if flying and not paused:
                context, _, call = flying[rng.choice(sorted(flying))]
                histories[rng.randrange(3)] = (context + (await asyncio.shield(call)).token_ids + [rng.randrange(61)])[
                    :500
                ]
    await engine.resume()
    async with asyncio.timeout(60):
        await asyncio.gather(*(call for _, _, call in flying.values()))
    for context, sampling, call in flying.values():
        result = call.result()
        n = len(result.token_ids)
        assert len(result.logprobs) == n <= sampling.max_new_tokens
        assert (result.finish_reason == "stop") == (n > 0 and result.token_ids[-1] in sampling.stop_token_ids)
        starts, versions = [s for s, _ in result.version_spans], [v for _, v in result.version_spans]
        assert starts == sorted(set(starts)) and versions == sorted(set(versions)) and (starts[:1] == [0]) == (n > 0)
        expected = [
            teacher_forced(model, context, result.token_ids, sampling.temperature) if n else [] for model in models
        ]
        for at, logprob in enumerate(result.logprobs):
            made_by = max(v for s, v in result.version_spans if s <= at)
            assert abs(logprob - expected[made_by % 2][at]) < 1e-3
    async with asyncio.timeout(30):
        while (stats := await engine.stats())["running"] or stats["waiting"]:
            await asyncio.sleep(0)


@pytest.mark.slow
async def test_swaps_under_continuous_submission(engine, two_models):
    swaps = SWAPS["hf" if isinstance(engine, HFEngine) else "vllm"]
    done = 0

    async def submit(i: int) -> None:
        nonlocal done
        while done < swaps:
            result = await engine.generate(prompt(10 + i), Sampling(1.0, 8, ()), BASE, str(i))
            assert len(result.token_ids) == 8

    async with asyncio.timeout(200), asyncio.TaskGroup() as group:
        for i in range(6):
            group.create_task(submit(i))
        for version in range(1, swaps + 1):
            await engine.pause()
            await engine.update_weights(version, two_models[version % 2])
            await engine.resume()
            done = version
    assert engine.versions() == {BASE: swaps}


async def test_a_pause_and_the_versions_of_others_leave_prefixes_alone(engine, base, tmp_path):
    await engine.publish_adapter("ada", 0, save_adapter(tmp_path / "0", base, seed=0))
    shared = prompt(150)
    first = await engine.generate(shared, Sampling(1.0, 2, ()), BASE, "first")
    before = (await engine.stats())["tokens_reused"]
    await engine.pause()
    await engine.publish_adapter("ada", 1, save_adapter(tmp_path / "1", base, seed=1))
    await engine.resume()
    longer = [*shared, *first.token_ids, 7]
    result = await engine.generate(longer, Sampling(1.0, 3, ()), BASE, "second")
    assert (await engine.stats())["tokens_reused"] - before >= 128  # the full blocks of the cache, at the least
    np.testing.assert_allclose(result.logprobs, teacher_forced(load(base), longer, result.token_ids, 1.0), atol=1e-4)
