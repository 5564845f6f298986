"""Generation through the proxy against the bare engine, adapters in one batch, and swaps of weights.

    python -m benchmarks.proxy [--quick] [--only proxy|lora|swap] --json

The proxy runs as it does in a run, by `infra.proxy.serve` in a process of its own with the embedded engine, on a real
S3 server, with keys; the requests come from this process. The bare engine is another HFEngine of the same model in a
third process, called there without any of that. Sides take turns within every round, and a figure is the median over
the rounds, so that what else the machine does hurts both alike; `spread` figures are the distance of the quartiles
over the median. One thread computes.

Two models, so that the overhead of a small one is shown and not hidden:
- calculator: the demo's (0.8 million parameters), trajectories as in the demo: 16 tokens of prompt, 4 turns of 6
  tokens, 8 tokens of observation;
- larger: nominally 13 million parameters, 64 tokens of prompt, 3 turns of 32 tokens, 24 of observation.

- `tokens_per_s_ratio`: tokens per second through the proxy over those of the bare engine, 32 trajectories at once, of
  the larger model; `tokens_per_s_ratio_calculator` of the demo's, and `..._12` with turns twice as long as there.
- `latency_added_p50_ms`: median latency of one request after another through the proxy, less that of the bare engine.
- `multi_lora_8_over_1`: tokens per second of one engine with eight adapters (rank 16, all linear layers) evenly mixed
  in each batch of 32 over those of one with one adapter; CPU time of the process is the clock. `_uneven`: tenants
  with 40 to 2 per cent of the rows.
- `swap_exposed_ratio`: time from suspend to the end of resume for a version that was prefetched, over the same without
  (its files are pulled from the store, read and verified with the engine suspended). `swap_over_local_load`: over only
  reading the files from this machine's cache and copying them into the model, without any store or proxy.

What was found, on a busy machine: beside the larger model the proxy costs nothing that could be told from
the noise. Beside the demo's it costs a third of the tokens: a turn there takes about 10 ms of CPU, and proxy and engine
share one interpreter, which is the likely cause and was not proved. (Starlette's layers,
a second and a third task per request and the look-up of labelled metrics were taken out of `/generate`: a third of its
CPU.) What an adapter costs is the number of small operations: eight of them in two batched products come close to one
alone, where a loop over them did not.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from benchmarks.proxy_models import CALCULATOR, LARGER, save_adapters, save_larger, swap_model
from benchmarks.proxy_traffic import Shape, Traffic, drive
from benchmarks.report import Figure, emit
from infra.engines.hf import HFEngine
from infra.engines.protocol import Sampling
from infra.engines.weights import WeightTarget, read_tensors
from infra.models.tiny import write_tiny
from infra.proxy.auth import Keys
from infra.proxy.client import ControlClient, ProxyClient, ProxyUnavailable
from infra.proxy.serve import serve
from infra.services import supervisor
from infra.services.endpoints import environment
from infra.services.processes import free_port
from infra.store.directories import push_directory
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection
from rl.config.load import validate
from rl.config.model import TinySection
from rl.config.run import RunConfig
from rl.records import StateRef

AT_ONCE = 32
START_S = 120.0
MEMORY = Path("/dev/shm")
"""Where files lie, if it is there: not the disk is measured."""
SPAWN = get_context("spawn")


class Side:
    """A process with one bare engine; `drive` there is `Traffic` here."""

    def __init__(self, model: Path, adapters: Sequence[Path] = ()):
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_side, args=(theirs, model, tuple(adapters)), daemon=True)
        self._process.start()

    def drive(self, *work: Any) -> Traffic:
        self._pipe.send(work)
        found = self._pipe.recv()
        assert isinstance(found, Traffic)
        return found

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _side(pipe: Connection, model: Path, adapters: tuple[Path, ...]) -> None:
    async def run() -> None:
        engine = HFEngine(model, device="cpu", base_version=0)
        for at, directory in enumerate(adapters):
            await engine.publish_adapter(f"tenant{at}", 1, directory)
        while (work := await asyncio.to_thread(pipe.recv)) is not None:
            pipe.send(await drive(engine.generate, *work))
        await engine.close()

    uvloop.run(run())


class Proxied:
    """A run whose proxy serves in a process of its own."""

    def __init__(self, store: ObjectStore, name: str, model: Path, work: Path):
        self._store = store
        tree = {
            "name": name,
            "domains": [{"name": "calculator", "environment": "calculator"}],
            "model": {"source": {"type": "pretrained", "path": str(model)}},
            "engine": {"device": "cpu"},
            "store": {"bucket": store.bucket},
        }
        self.config = validate(tree, "benchmark")
        push_directory(store, f"{self.config.prefix}base/", model)
        self._log = CommitLog(store, self.config.prefix, "trainer")
        self.fence = self._log.fence()
        self.publish(model)
        self._stop, port, self.keys = SPAWN.Event(), free_port(set()), Keys.random()
        self.url = f"http://127.0.0.1:{port}"
        place = (self.config, port, work / name, self._stop, self.keys)
        self._process = SPAWN.Process(target=_serve, args=place, daemon=True)
        self._process.start()
        self.control = ControlClient(self.url, START_S, self.fence, self.keys.control)
        end = time.monotonic() + START_S
        while True:
            try:
                self.control.status(5.0)
                break
            except ProxyUnavailable:
                if time.monotonic() > end or not self._process.is_alive():
                    raise
                time.sleep(0.1)

    def publish(self, model: Path) -> int:
        """Commit a version with this model."""
        prefix = self._log.state_prefix()
        shas = push_directory(self._store, self.config.prefix + prefix, model.parent)
        state = StateRef(prefix=prefix, manifest_sha256=shas, full=False)
        return self._log.append_step(state=state, weights_sha256="0" * 64, alpha=1).version

    def drive(self, *work: Any) -> Traffic:
        async def run() -> Traffic:
            client = ProxyClient(self.url, self.keys.rollout)

            async def generate(tokens: Sequence[int], sampling: Sampling, tenant: str, request: str) -> Any:
                trajectory = request.rpartition("-")[0]
                return await client.generate(
                    trajectory=trajectory, request=request, tenant=tenant, token_ids=tokens, sampling=sampling,
                    start_version=0, deadline_s=START_S, domain="calculator",
                )  # fmt: skip

            try:
                return await drive(generate, *work)
            finally:
                await client.close()

        return uvloop.run(run())

    def close(self) -> None:
        self.control.close()
        self._stop.set()
        self._process.join()


def _serve(config: RunConfig, port: int, cache: Path, stopped: Any, keys: Keys) -> None:
    logging.disable(logging.WARNING)
    stop = threading.Event()

    def watch() -> None:
        stopped.wait()
        stop.set()

    threading.Thread(target=watch, daemon=True).start()
    serve(config, "127.0.0.1", port, cache, stop, keys)


def spread(values: Sequence[float]) -> float:
    low, middle, high = quantiles(values, n=4)
    return (high - low) / middle


def through_proxy(
    name: str, proxied: Proxied, bare: Side, shape: Shape, rounds: int, trajectories: int, goal: float | None
) -> list[Figure]:
    ratios, speeds = [], []
    for turn in range(-1, rounds):  # the first round warms both up
        work = (shape, turn + 1, trajectories, AT_ONCE)
        sides: list[Any] = [proxied, bare]
        found = {side: side.drive(*work) for side in (sides if turn % 2 else sides[::-1])}
        if turn >= 0:
            speed = {side: traffic.tokens / traffic.seconds for side, traffic in found.items()}
            ratios.append(speed[proxied] / speed[bare])
            speeds.append(speed[bare])
            print(name, {"proxy": round(speed[proxied]), "bare": round(speed[bare])}, flush=True)
    return [
        Figure(name, median(ratios), "ratio", goal, "higher"),
        Figure(f"{name}_spread", spread(ratios), "of the median"),
        Figure(f"{name}_bare", median(speeds), "tokens/s"),
    ]


def latency(proxied: Proxied, bare: Side, shape: Shape, rounds: int) -> list[Figure]:
    added, alone = [], []
    for turn in range(-1, rounds):
        work = (shape, 1000 + turn, 6, 1)
        through, without = proxied.drive(*work), bare.drive(*work)
        if turn >= 0:
            alone.append(median(without.latencies) * 1e3)
            added.append(median(through.latencies) * 1e3 - alone[-1])
    return [
        Figure("latency_added_p50_ms", median(added), "ms", 3.0),
        Figure("latency_bare_p50_ms", median(alone), "ms"),
    ]


def multi_lora(model: Path, adapters: Sequence[Path], rounds: int) -> list[Figure]:
    one, eight = Side(model, adapters[:1]), Side(model, adapters)
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


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def swaps(store: ObjectStore, work: Path, rounds: int, mib: int) -> list[Figure]:
    models = [swap_model(work / f"swap{at}" / "model", mib, at) for at in range(2)]
    proxied = Proxied(store, "swap", models[0], work)
    module = HFEngine(models[0], device="cpu")
    target = WeightTarget(module._loop._module)
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
                taken = seconds(lambda v=version: swap(v))  # type: ignore[misc]
                if turn >= 0:
                    spent[side].append(taken)
            local = seconds(lambda at=turn % 2: load(models[at]))  # type: ignore[misc]
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


def proxies(store: ObjectStore, work: Path, quick: bool) -> list[Figure]:
    small, large = work / "calculator" / "model", work / "larger" / "model"
    write_tiny(TinySection(), 0, small)
    save_larger(large)
    rounds, figures = 5 if quick else 11, []
    for model, shapes in (
        (large, [("tokens_per_s_ratio", LARGER, 32, 0.95)]),
        (
            small,
            [
                ("tokens_per_s_ratio_calculator", CALCULATOR, 128, 0.95),
                ("tokens_per_s_ratio_calculator_12", Shape(16, 4, 12, 8), 64, 0.95),
            ],
        ),
    ):
        proxied, bare = Proxied(store, model.parent.name, model, work), Side(model)
        try:
            for name, shape, trajectories, goal in shapes:
                figures += through_proxy(name, proxied, bare, shape, rounds, trajectories, goal)
            if model is small:
                figures += latency(proxied, bare, Shape(16, 4, 12, 8), 3 * rounds)
        finally:
            proxied.close()
            bare.close()
    return figures


def main(quick: bool, only: str | None) -> list[Figure]:
    figures: list[Figure] = []
    print(f"load averages at the start: {os.getloadavg()}")
    memory = MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 8 << 30 else None
    with TemporaryDirectory(prefix="rollmill-benchmark-", dir=memory) as home:
        work = Path(home)
        if only in (None, "lora"):
            write_tiny(TinySection(), 0, work / "lora")
            figures += multi_lora(work / "lora", save_adapters(work, work / "lora", 8), 5 if quick else 15)
        if only in (None, "proxy", "swap"):
            try:
                services = supervisor.up(work / "services", supervisor.AUTO, ["s3"])
                os.environ.update(environment(services))
                store = ObjectStore.connect(StoreSection())
                store.ensure_bucket()
                if only in (None, "swap"):
                    figures += swaps(store, work, 5 if quick else 9, 64 if quick else 512)
                if only in (None, "proxy"):
                    figures += proxies(store, work, quick)
            finally:
                supervisor.down(work / "services")
    print(f"load averages at the end: {os.getloadavg()}")
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and an eighth of the bytes in swaps")
    parser.add_argument("--only", choices=["proxy", "lora", "swap"], help="one part")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry: the last line always is JSON")
    arguments = parser.parse_args()
    emit("proxy", main(arguments.quick, arguments.only))
