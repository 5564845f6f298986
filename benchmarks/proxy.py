"""Generation through the proxy against the bare engine, adapters in one batch, and swaps of weights.

    python -m benchmarks.proxy [--quick] [--only proxy|lora|swap|vllm] --json

The proxy runs as it does in a run, by `infra.proxy.serve` in a process of its own on a real S3 server, with keys; its
engine is the embedded one, in a process of its own by `infra.engines.process` (`engine.instances`) or inside the proxy
(the default). The requests come from this process. Sides take turns within every round, and a figure is the median
over the rounds, so that what else the machine does hurts all alike; `_spread` figures are the distance of the quartiles
over the median. One thread computes.

Two models, so that the overhead of a small one is shown and not hidden:
- calculator: the demo's (0.8 million parameters), trajectories as in the demo: 16 tokens of prompt, 4 turns of 6
  tokens, 8 tokens of observation; `_12` with turns twice as long;
- larger: nominally 13 million parameters, 64 tokens of prompt, 3 turns of 32 tokens, 24 of observation.

The demo's model, the engine in a process of its own, 32 trajectories at once:
- `tokens_per_s_ratio`: tokens per second through the proxy over those of the same engine called at its own address.
- `latency_added_p50_ms`: median time of a turn through the proxy, less that at the engine's own address; `_alone` of
  one trajectory at a time.
- `tokens_per_s_ratio_within`: over those of another such engine that is called within its process, without HTTP.

`--only vllm` (`rollmill engine install --cpu`): the same two with a vLLM server as the engine.

`tokens_per_s_ratio_inside_...`: the engine inside the proxy's process, over one that is called within its process.

- `multi_lora_8_over_1`: tokens per second of one engine with eight adapters (rank 16, all linear layers) evenly mixed
  in each batch of 32 over those of one with one adapter; CPU time of the process is the clock. `_uneven`: tenants
  with 40 to 2 per cent of the rows.
- `swap_exposed_ratio`: time from suspend to the end of resume for a version that was prefetched, over the same without
  (its files are pulled from the store, read and verified with the engine suspended). `swap_over_local_load`: over only
  reading the files from this machine's cache and copying them into the model, without any store or proxy.

What adapters cost is the number of small operations: eight of them in two batched products come close to one alone,
where a loop over them did not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

from benchmarks.proxy_models import CALCULATOR, LARGER, save_adapters, save_larger, swap_model
from benchmarks.proxy_sides import Bare, Direct, Proxied, Served, Side
from benchmarks.proxy_traffic import Shape, Traffic
from benchmarks.report import Figure, emit, timed
from infra.engines.hf import HFEngine
from infra.engines.weights import read_tensors
from infra.models.tiny import write_tiny
from infra.services import supervisor
from infra.services.endpoints import environment
from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection
from rl.config.model import TinySection

AT_ONCE = 32
MEMORY = Path("/dev/shm")
"""Where files lie, if it is there: not the disk is measured."""
TWICE = Shape(CALCULATOR.prompt, CALCULATOR.turns, 2 * CALCULATOR.answer, CALCULATOR.observation)


def spread(values: Sequence[float]) -> float:
    low, middle, high = quantiles(values, n=4)
    return (high - low) / middle


def played(
    name: str, sides: Mapping[str, Side], shape: Shape, rounds: int, trajectories: int, at_once: int = AT_ONCE
) -> dict[str, list[Traffic]]:
    """The traffic of each side in each round; the first round, which warms all up, is left out."""
    found: dict[str, list[Traffic]] = {side: [] for side in sides}
    for turn in range(-1, rounds):
        for place, side in enumerate(list(sides)[:: 1 if turn % 2 else -1]):
            # prompts of one's own, for sides may share an engine and what it keeps of them
            traffic = sides[side].drive(shape, (turn + 1) * len(sides) + place, trajectories, at_once)
            if turn >= 0:
                found[side].append(traffic)
        if turn >= 0:
            print(name, {side: told(traffic[-1]) for side, traffic in found.items()}, flush=True)
    return found


def told(traffic: Traffic) -> str:
    return f"{speed(traffic):.0f} tokens/s, {median(traffic.latencies) * 1e3:.1f} ms"


def speed(traffic: Traffic) -> float:
    return traffic.tokens / traffic.seconds


def speeds(
    name: str, through: Sequence[Traffic], without: Sequence[Traffic], goal: float | None = None
) -> list[Figure]:
    ratios = [speed(a) / speed(b) for a, b in zip(through, without, strict=True)]
    return [
        Figure(name, median(ratios), "ratio", goal, "higher"),
        Figure(f"{name}_spread", spread(ratios), "of the median"),
        Figure(f"{name}_without", median(map(speed, without)), "tokens/s"),
    ]


def added(name: str, through: Sequence[Traffic], without: Sequence[Traffic], goal: float | None = None) -> list[Figure]:
    """Milliseconds of a turn, in the median of each round."""
    rounds = [[median(traffic.latencies) * 1e3 for traffic in side] for side in (through, without)]
    return [
        Figure(name, median(a - b for a, b in zip(*rounds, strict=True)), "ms", goal),
        Figure(name.replace("added", "without"), median(rounds[1]), "ms"),
    ]


def multi_lora(model: Path, adapters: Sequence[Path], rounds: int) -> list[Figure]:
    one, eight = Bare(model, adapters[:1]), Bare(model, adapters)
    every = [f"tenant{at}" for at in range(len(adapters))]
    uneven = [every[at] for at in (0,) * 20 + (1,) * 12 + (2,) * 7 + (3,) * 4 + (4,) * 3 + (5, 5, 6, 7)]
    ratios: dict[str, list[float]] = {"even": [], "uneven": []}
    try:
        for turn in range(-1, rounds):
            found = {}
            for side, tenants in (("one", every[:1]), ("even", every), ("uneven", uneven)):
                engine = one if side == "one" else eight
                found[side] = engine.drive(CALCULATOR, 2000 + turn, 2 * AT_ONCE, AT_ONCE, tenants)
            cost = {side: traffic.cpu_s / traffic.tokens for side, traffic in found.items()}
            if turn >= 0:
                for side, values in ratios.items():
                    values.append(cost["one"] / cost[side])
                print("lora, CPU ms/token", {side: round(value * 1e3, 3) for side, value in cost.items()}, flush=True)
    finally:
        one.close()
        eight.close()
    return [
        Figure("multi_lora_8_over_1", median(ratios["even"]), "ratio", 0.87, "higher"),
        Figure("multi_lora_8_over_1_spread", spread(ratios["even"]), "of the median"),
        Figure("multi_lora_8_over_1_uneven", median(ratios["uneven"]), "ratio"),
    ]


def swaps(store: ObjectStore, work: Path, rounds: int, mib: int) -> list[Figure]:
    models = [swap_model(work / f"swap{at}" / "model", mib, at) for at in range(2)]
    proxied = Proxied(store, "swap", models[0], work)
    module = HFEngine(models[0], device="cpu")
    target = module._target
    spent: dict[str, list[float]] = {"prefetched": [], "naive": [], "local": []}

    def swap(version: int) -> None:
        proxied.control.suspend()
        proxied.control.update(version, oldest_viable=0)
        proxied.control.resume()

    def load(directory: Path) -> None:
        for name, tensor in target.verify(read_tensors(directory)).items():
            target._tensors[name].data.copy_(tensor)

    try:
        for turn in range(-1, rounds):
            for side in ("prefetched", "naive"):
                version = proxied.publish(models[(turn + (side == "naive")) % 2])
                if side == "prefetched":
                    proxied.control.prefetch(version)
                taken = timed(lambda v=version: swap(v))  # type: ignore[misc]
                if turn >= 0:
                    spent[side].append(taken)
            local = timed(lambda at=turn % 2: load(models[at]))  # type: ignore[misc]
            if turn >= 0:
                spent["local"].append(local)
                print("swap", {side: round(values[-1], 4) for side, values in spent.items()}, flush=True)
    finally:
        asyncio.run(module.close())
        proxied.close()
    quick = spent["prefetched"]
    return [
        Figure("swap_exposed_ratio", median(a / b for a, b in zip(quick, spent["naive"], strict=True)), "ratio", 0.1),
        Figure("swap_over_local_load", median(a / b for a, b in zip(quick, spent["local"], strict=True)), "ratio"),
        *(Figure(f"swap_{side}_s", median(values), "s") for side, values in spent.items()),
    ]


def apart(store: ObjectStore, work: Path, model: Path, rounds: int) -> list[Figure]:
    """The engine in a process of its own."""
    proxied, figures = Proxied(store, f"{model.parent.name}-apart", model, work, apart=True), []
    sides: dict[str, Side] = {"proxy": proxied, "engine": Direct(proxied), "within": Bare(model)}
    try:
        for name, shape, trajectories, goal in (("", CALCULATOR, 160, 0.95), ("_12", TWICE, 80, None)):
            found = played(f"apart{name}", sides, shape, rounds, trajectories)
            figures += speeds(f"tokens_per_s_ratio{name}", found["proxy"], found["engine"], goal)
            figures += added(f"latency_added_p50_ms{name}", found["proxy"], found["engine"], goal and 3.0)
            figures += speeds(f"tokens_per_s_ratio_within{name}", found["proxy"], found["within"])
        one = {side: sides[side] for side in ("proxy", "engine")}
        found = played("apart, one at once", one, TWICE, rounds, 6, 1)
        figures += added("latency_added_p50_ms_alone", found["proxy"], found["engine"], 3.0)
    finally:
        for side in sides.values():
            side.close()
    return figures


def inside(store: ObjectStore, work: Path, small: Path, large: Path, rounds: int) -> list[Figure]:
    """The engine in the proxy's process."""
    figures: list[Figure] = []
    for model, shapes in (
        (large, [("larger", LARGER, 32)]),
        (small, [("calculator", CALCULATOR, 128), ("calculator_12", TWICE, 64)]),
    ):
        sides: dict[str, Side] = {"proxy": Proxied(store, model.parent.name, model, work), "within": Bare(model)}
        try:
            for name, shape, trajectories in shapes:
                found = played(f"inside, {name}", sides, shape, rounds, trajectories)
                figures += speeds(f"tokens_per_s_ratio_inside_{name}", found["proxy"], found["within"])
            if model is small:
                found = played("inside, one at once", sides, TWICE, rounds, 6, 1)
                figures += added("latency_added_p50_ms_inside_alone", found["proxy"], found["within"])
        finally:
            for side in sides.values():
                side.close()
    return figures


def vllm(store: ObjectStore, work: Path, rounds: int) -> list[Figure]:
    """vLLM, run by somebody else."""
    model = work / "vllm" / "model"
    write_tiny(TinySection(), 0, model)
    served = Served(model, work / "vllm-server")
    sides: dict[str, Side] = {"engine": served}
    try:
        sides = {"proxy": Proxied(store, "vllm", model, work, external=served)} | sides
        found = played("vllm", sides, CALCULATOR, rounds, 128)
        one = played("vllm, one at once", sides, TWICE, rounds, 6, 1)
    finally:
        for side in sides.values():
            side.close()
    return [
        *speeds("tokens_per_s_ratio_vllm", found["proxy"], found["engine"]),
        *added("latency_added_p50_ms_vllm", found["proxy"], found["engine"]),
        *added("latency_added_p50_ms_vllm_alone", one["proxy"], one["engine"]),
    ]


def proxies(store: ObjectStore, work: Path, quick: bool) -> list[Figure]:
    small, large = work / "calculator" / "model", work / "larger" / "model"
    write_tiny(TinySection(), 0, small)
    save_larger(large)
    rounds = 5 if quick else 11
    return apart(store, work, small, rounds) + inside(store, work, small, large, rounds)


def main(quick: bool, only: str | None) -> list[Figure]:
    figures: list[Figure] = []
    print(f"load averages at the start: {os.getloadavg()}")
    memory = MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 8 << 30 else None
    with TemporaryDirectory(prefix="rollmill-benchmark-", dir=memory) as home:
        work = Path(home)
        if only in (None, "lora"):
            write_tiny(TinySection(), 0, work / "lora")
            figures += multi_lora(work / "lora", save_adapters(work, work / "lora", 8), 5 if quick else 45)
        if only != "lora":
            try:
                services = supervisor.up(work / "services", supervisor.AUTO, ["s3"])
                os.environ.update(environment(services))
                store = ObjectStore.connect(StoreSection())
                store.ensure_bucket()
                if only in (None, "swap"):
                    figures += swaps(store, work, 5 if quick else 9, 64 if quick else 512)
                if only == "vllm":
                    figures += vllm(store, work, 5 if quick else 11)
                if only in (None, "proxy"):
                    figures += proxies(store, work, quick)
            finally:
                supervisor.down(work / "services")
    print(f"load averages at the end: {os.getloadavg()}")
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and an eighth of the bytes in swaps")
    parser.add_argument("--only", choices=["proxy", "lora", "swap", "vllm"], help="one part")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry: the last line always is JSON")
    arguments = parser.parse_args()
    emit("proxy", main(arguments.quick, arguments.only))
