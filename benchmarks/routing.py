"""What sticky routing keeps: the share of prompt tokens that engines need not compute, against routing at random.

    python -m benchmarks.routing [--quick] --json

Four real engines (transformers, the model of the demo), eight sequences each; 28 trajectories at once, six turns
each, whose prompts grow turn by turn. One side is the proxy's fleet (`infra.proxy.fleet`, which asks `rl.routing`), the
other sends each turn to an engine at random; the engines keep prefixes in the same way. Counted by the engines
themselves: tokens reused over tokens reused or prefilled. `attainable` is what one engine with room for all reuses.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.proxy_traffic import Shape, Traffic, drive
from benchmarks.report import Figure, emit
from infra.engines.hf import HFEngine
from infra.engines.protocol import Generation, Sampling
from infra.models.tiny import write_tiny
from infra.proxy.fleet import Fleet, Origin
from infra.proxy.members import Facts
from rl.config.model import TinySection
from rl.placement import HardwareClass, Placement
from rl.routing import Router

ENGINES, SLOTS, AT_ONCE = 4, 8, 28
SHAPE = Shape(prompt=96, turns=6, answer=8, observation=24)
WHERE = HardwareClass.BANDWIDTH_GPU


async def hit_rate(engines: Sequence[HFEngine]) -> float:
    stats = [await engine.stats() for engine in engines]
    reused, computed = (sum(s[name] for s in stats) for name in ("tokens_reused", "tokens_prefilled"))
    return reused / (reused + computed)


def make(model: Path, count: int, slots: int) -> list[HFEngine]:
    return [HFEngine(model, device="cpu", max_batch=slots, base_version=0) for _ in range(count)]


async def sticky(model: Path, trajectories: int) -> tuple[float, Traffic]:
    engines = make(model, ENGINES, SLOTS)
    fleet = Fleet(Router(Placement({}, WHERE), prefill_heavy=32.0), control_s=60.0, max_waiting=1000)
    for at, engine in enumerate(engines):
        fleet.members.add(Facts(f"engine-{at}", f"engine-{at}", WHERE, SLOTS, engine.capacity), engine)

    async def generate(tokens: Sequence[int], sampling: Sampling, tenant: str, request: str) -> Generation:
        return await fleet.generate(tokens, sampling, tenant, request, Origin(request.rpartition("-")[0]))

    traffic = await drive(generate, SHAPE, 0, trajectories, AT_ONCE)
    rate = await hit_rate(engines)
    await fleet.close()
    return rate, traffic


async def scattered(model: Path, trajectories: int, count: int, slots: int) -> tuple[float, Traffic]:
    engines, chance = make(model, count, slots), random.Random(0)

    async def generate(tokens: Sequence[int], sampling: Sampling, tenant: str, request: str) -> Generation:
        return await chance.choice(engines).generate(tokens, sampling, tenant, request)

    traffic = await drive(generate, SHAPE, 0, trajectories, AT_ONCE)
    rate = await hit_rate(engines)
    for engine in engines:
        await engine.close()
    return rate, traffic


def main(quick: bool) -> list[Figure]:
    trajectories = 56 if quick else 224
    with TemporaryDirectory(prefix="rollmill-benchmark-") as home:
        model = Path(home) / "model"
        write_tiny(TinySection(), 0, model)
        kept, with_sticky = asyncio.run(sticky(model, trajectories))
        chance, at_random = asyncio.run(scattered(model, trajectories, ENGINES, SLOTS))
        most, _ = asyncio.run(scattered(model, trajectories, 1, ENGINES * SLOTS))
    assert with_sticky.tokens == at_random.tokens
    return [
        Figure("sticky_prefix_hits", kept, "of prompt tokens"),
        Figure("random_prefix_hits", chance, "of prompt tokens"),
        Figure("attainable_prefix_hits", most, "of prompt tokens"),
        Figure("sticky_over_random_prefix_hits", kept / chance, "ratio"),
        Figure("sticky_over_attainable_prefix_hits", kept / most, "ratio", 0.95, "higher"),
        Figure("sticky_over_random_tokens_per_s", at_random.seconds / with_sticky.seconds, "ratio"),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer trajectories")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry: the last line always is JSON")
    emit("routing", main(parser.parse_args().quick))
