"""The weight store against raw S3, and what publishing costs the trainer.

    python -m benchmarks.weights [--quick] --json

A version of 1 GiB (`--quick`: 128 MiB) in files of 512 MiB, on an S3 server of its own whose data, like all files here,
lies in memory: what is measured is our work and the server's, not a disk. Sides take turns within every round; a figure
is the median over the rounds.

- `push_pull_over_raw`: what a plain boto3 program needs for upload and download of the same files, with the same parts
  and as many threads (upload_part and ranged get_object, from file to file, nothing hashed or verified), over what the
  weight store needs. At 1 it would be as fast.
- `stall_over_blocking`: how long the trainer's thread is held when it publishes a model of that size beside training
  (copy, hand over), over how long it is held when it publishes in line (copy, save, push, record).
- `delay_over_blocking`: how much longer a loop takes in the trainer's thread that mostly waits, as for a GPU, while
  a version is published beside it; over the same. The server runs on the same cores.
- Mooncake: push and pull of the same bytes through a Mooncake Store on this machine, where its library is installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.report import Figure, emit, timed
from benchmarks.weight_sides import Raw, Side
from infra.services import supervisor
from infra.services.endpoints import environment
from infra.services.processes import free_port
from infra.store.directories import Shelf
from infra.store.mooncake import RDMA, MooncakeShelf, MooncakeUnavailable
from infra.store.objects import ObjectStore
from infra.store.weights import WeightStore
from infra.training import setup
from rl.config.infrastructure import MooncakeWeights, StoreSection

MIB = 1 << 20
MEMORY = Path("/dev/shm")


@contextmanager
def bucket(name: str) -> Iterator[ObjectStore]:
    """A bucket that gives its room back."""
    store = ObjectStore.connect(StoreSection(bucket=name))
    store.ensure_bucket()
    try:
        yield store
    finally:
        for key in store.keys(""):  # a log record, too
            store.client.delete_object(Bucket=name, Key=key)
        store.client.delete_bucket(Bucket=name)


def one_way_and_back(shelf: Shelf, prefix: str, version: Path, cache: Path) -> tuple[float, float]:
    """Seconds of a push and of a pull of the weight store."""
    weights = WeightStore(shelf)
    shas: list[str] = []
    push = timed(lambda: shas.append(weights.push(prefix, version)))
    pull = timed(lambda: weights.pull(prefix, shas[0], cache))
    shutil.rmtree(cache)
    return push, pull


def transfer(client: Any, work: Path, size: int, rounds: int) -> list[Figure]:
    version = work / "version"
    for i in range(2):
        (version / "model").mkdir(parents=True, exist_ok=True)
        with (version / "model" / f"model-{i}.safetensors").open("wb") as file:
            for _ in range(0, size // 2, 4 * MIB):
                file.write(os.urandom(4 * MIB))
    seconds: dict[str, list[float]] = {side: [] for side in ("push", "pull", "raw push", "raw pull")}

    def ours(store: ObjectStore) -> None:
        push, pull = one_way_and_back(store, "v/", version, work / "pulled")
        seconds["push"].append(push)
        seconds["pull"].append(pull)

    def raw(store: ObjectStore) -> None:
        plain = Raw(client, store.bucket)
        seconds["raw push"].append(timed(lambda: plain.push("v/", version)))
        seconds["raw pull"].append(timed(lambda: plain.pull("v/", version, work / "pulled")))
        shutil.rmtree(work / "pulled")

    for turn in range(rounds):
        for side in (ours, raw) if turn % 2 else (raw, ours):
            with bucket(f"{side.__name__}-{turn}") as store:
                side(store)
        print({side: round(spent[-1], 2) for side, spent in seconds.items()}, flush=True)
    whole = [a + b for a, b in zip(seconds["push"], seconds["pull"], strict=True)]
    plain = [a + b for a, b in zip(seconds["raw push"], seconds["raw pull"], strict=True)]
    ratio = median(b / a for a, b in zip(whole, plain, strict=True))
    figures = [Figure("push_pull_over_raw", ratio, "ratio", goal=0.7, better="higher")]
    figures += [
        Figure(f"{side.replace(' ', '_')}_speed", size / median(spent) / 1e9, "GB/s") for side, spent in seconds.items()
    ]
    return figures + mooncake(work, version, size, rounds)


def mooncake(work: Path, version: Path, size: int, rounds: int) -> list[Figure]:
    taken: set[int] = set()
    port, metrics = free_port(taken), free_port(taken)
    program = Path(sysconfig.get_path("purelib")) / "mooncake" / "mooncake_master"
    if not program.exists():
        print("mooncake: not installed")
        return []
    local = ["--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1", f"--metrics_port={metrics}"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([program, *local], env={**os.environ, "LD_LIBRARY_PATH": str(RDMA)}, **quiet) as master:
        try:
            shelf = _join(MooncakeWeights(master=f"127.0.0.1:{port}"), size)
            pushes, pulls = [], []
            for turn in range(rounds):
                push, pull = one_way_and_back(shelf, f"v{turn}/", version, work / "pulled")
                pushes.append(push)
                pulls.append(pull)
                shelf.forget(f"v{turn}/")
            shelf.close()
        except MooncakeUnavailable as error:
            print(f"mooncake: {error}")
            return []
        finally:
            master.kill()
    return [
        Figure("mooncake_push_speed", size / median(pushes) / 1e9, "GB/s"),
        Figure("mooncake_pull_speed", size / median(pulls) / 1e9, "GB/s"),
    ]


def _join(section: MooncakeWeights, size: int) -> MooncakeShelf:
    """Once the master has started."""
    end = time.monotonic() + 20
    while True:
        try:
            return MooncakeShelf(section, lend_bytes=2 * size)
        except MooncakeUnavailable as error:
            if "can not be reached" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.1)


def wait_for_a_device(until: Callable[[], bool]) -> tuple[int, float]:
    """Turns of a loop that waits for a millisecond, and seconds."""
    turns, begin = 0, time.perf_counter()
    while not until():
        time.sleep(0.001)
        turns += 1
    return turns, time.perf_counter() - begin


def stall(work: Path, size: int, rounds: int) -> list[Figure]:
    model = make_model(size)
    turns, seconds = wait_for_a_device(lambda end=time.monotonic() + 2: time.monotonic() > end)  # type: ignore[misc]
    undisturbed = seconds / turns
    held: dict[str, list[float]] = {"blocking": [], "stall": [], "delay": []}
    for turn in range(rounds):
        with bucket(f"stall-{turn}") as store, ExitStack() as stack:
            sides = [Side(store, model, work / f"stall-{turn}", alpha) for alpha in (0, 1)]
            for side in sides:
                stack.callback(side.publisher.close)
            held["blocking"].append(sides[0].publish())
            held["stall"].append(sides[1].publish())
            publisher = sides[1].publisher
            turns, seconds = wait_for_a_device(lambda p=publisher: p.projected is None)  # type: ignore[misc]
            held["delay"].append(held["stall"][-1] + seconds - turns * undisturbed)
            publisher.wait()
        shutil.rmtree(work / f"stall-{turn}")
        print({side: round(spent[-1], 3) for side, spent in held.items()}, flush=True)

    def over(side: str) -> float:
        return median(a / b for a, b in zip(held[side], held["blocking"], strict=True))

    return [
        Figure("stall_over_blocking", over("stall"), "ratio", goal=0.05),
        Figure("delay_over_blocking", over("delay"), "ratio"),
        *(Figure(f"{side}_s", median(spent), "s") for side, spent in held.items()),
    ]


def make_model(size: int) -> torch.nn.Module:
    """A language model of about `size` bytes in single precision, a quarter of it its tables of embeddings."""
    hidden = 512
    config = Qwen3Config(
        vocab_size=size // 4 // (8 * hidden), hidden_size=hidden, intermediate_size=4 * hidden, num_attention_heads=8,
        num_key_value_heads=8, head_dim=64, num_hidden_layers=max(1, size * 3 // 4 // (64 * hidden**2)),
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    print(f"model: {sum(p.numel() for p in model.parameters()) * 4 / MIB:.0f} MiB", flush=True)
    return model


def main(quick: bool) -> list[Figure]:
    setup.prepare_process(1)
    size, rounds = (128 * MIB, 3) if quick else (1024 * MIB, 3)
    memory = MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 8 * size else None
    with TemporaryDirectory(prefix="rollmill-benchmark-", dir=memory) as home:
        try:
            endpoints = supervisor.up(Path(home) / "services", supervisor.AUTO, ["s3"])
            os.environ.update(environment(endpoints))
            plain = endpoints.need_s3().client(read_timeout=60.0, attempts=5)
            figures = transfer(plain, Path(home), size, rounds)
            return figures + stall(Path(home), size, rounds)
        finally:
            supervisor.down(Path(home) / "services")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the bytes")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry: the last line always is JSON")
    emit("weights", main(parser.parse_args().quick))
