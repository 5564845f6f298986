"""CPU cost of the machinery per trajectory, over the same stages as raw Dask futures.

    python -m benchmarks.orchestration [--quick] --json

Both sides run trivial stages (reset -> interact -> score per member, admit per group) with the same resources on
the same local cluster, in turns within one run; the cost is the CPU time of this process, the scheduler (in it)
and the workers, divided by the number of trajectories. The Prefect server, which this starts for itself, records
task runs at its own pace in a process of its own; that is no part of the figures.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from queue import Queue
from statistics import median
from tempfile import TemporaryDirectory
from time import sleep
from typing import Any

import psutil
from distributed import Client, as_completed
from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from benchmarks.report import Figure, emit
from flows.units import Ended, Unit, group_unit, trajectory_unit
from infra.compute.graphs import GroupGraph, Placements, Stages
from infra.compute.pools import cluster, connect, slots
from infra.services import supervisor
from infra.services.endpoints import environment
from rl.config.infrastructure import LocalPools
from rl.placement import runs_on
from rl.trajectory import Problem, Uid

SIZE = 8
"""Trajectories per group."""
AT_ONCE = 32
"""Groups in flight."""


@runs_on("cpu")
async def reset(run: str, uid: Uid, member: int, retry: int, problem: Problem, version: int) -> tuple[Uid, int]:
    return uid, member


@runs_on("cpu")
async def interact(run: str, handle: tuple[Uid, int]) -> tuple[Uid, int]:
    return handle


@runs_on("lambda")
def score(run: str, trajectory: tuple[Uid, int]) -> tuple[Uid, int]:
    return trajectory


@runs_on("cpu")
def admit(run: str, *members: tuple[Uid, int]) -> int:
    return len(members)


STAGES = Stages(reset, interact, score, admit)


def raw(client: Client, groups: range) -> None:
    """The same stages as plain futures, every group in flight from the start, as Dask users write it."""
    cpu, rewards = {"cpu": 1}, {"lambda": 1}
    admits = []
    for g in groups:
        scored = []
        for m in range(SIZE):
            handle = client.submit(reset, "raw", Uid(g, 0), m, 0, _problem(g), 0, resources=cpu, pure=False)
            played = client.submit(interact, "raw", handle, resources=cpu, pure=False)
            scored.append(client.submit(score, "raw", played, resources=rewards, pure=False))
        admits.append(client.submit(admit, "raw", *scored, resources=cpu, pure=False))
    for future in as_completed(admits, loop=client.loop):
        assert future.result() == SIZE


def ours(client: Client, placements: Placements, groups: range, unit: str) -> None:
    """Through the Prefect units and the group graph, as the rollout flow does it."""

    runner: Any = ThreadPoolTaskRunner(max_workers=AT_ONCE * SIZE)

    @flow(
        name=f"orchestration-{unit}",
        task_runner=runner,
        validate_parameters=False,
    )
    def run() -> None:
        outbox: Queue[Ended] = Queue()
        waiting, flying = list(groups), 0
        while waiting or flying:
            while waiting and flying < AT_ONCE:
                g = waiting.pop(0)
                graph = GroupGraph(client, placements, unit, Uid(g, 0), _problem(g), 0, SIZE, 2, 120)
                this = Unit(graph, outbox)
                if unit == "group":
                    group_unit.submit(str(graph.uid), "trivial", 0, this)
                else:
                    for m in range(SIZE):
                        trajectory_unit.submit(str(graph.uid), "trivial", 0, m, this)
                flying += 1
            ended = outbox.get(timeout=120)
            assert ended.sealed == SIZE, ended.failure
            flying -= 1

    run()


def with_server(arguments: list[str]) -> int:
    """This module again, in a process that has a Prefect server of its own and the console's log level."""
    with TemporaryDirectory(prefix="rollmill-benchmark-") as home:
        try:
            ours = environment(supervisor.up(home, supervisor.AUTO, ["prefect"]))
            env = {**os.environ, **ours, "PREFECT_LOGGING_LEVEL": "WARNING"}
            return subprocess.run([sys.executable, "-m", "benchmarks.orchestration", *arguments], env=env).returncode
        finally:
            supervisor.down(home)


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in processes)


def measure(work: Callable[[], None], processes: list[psutil.Process], trajectories: int) -> float:
    """CPU-milliseconds per trajectory."""
    before = cpu_seconds(processes)
    work()
    return (cpu_seconds(processes) - before) / trajectories * 1e3


def main(quick: bool) -> list[Figure]:
    groups, rounds = (40, 3) if quick else (100, 5)
    pools = LocalPools.model_validate({"compute_gpu": 0, "bandwidth_gpu": 0, "cpu": 256, "lambda": 16})
    cost: dict[str, list[float]] = {"raw": [], "group": [], "trajectory": []}
    with cluster(pools, 60) as address, connect(address, 60) as client:
        placements = Placements(STAGES, slots(client))
        me = psutil.Process()
        processes = [me, *me.children(recursive=True)]
        at = 0
        for round_ in range(-1, rounds):  # the first one warms up
            for side in cost:
                ids = range(at, at + groups)
                at += groups
                work = partial(raw, client, ids) if side == "raw" else partial(ours, client, placements, ids, side)
                value = measure(work, processes, groups * SIZE)
                if round_ >= 0:
                    cost[side].append(value)
                sleep(0.5)
    ratio = {
        side: median(a / b for a, b in zip(cost[side], cost["raw"], strict=True)) for side in ("group", "trajectory")
    }
    return [
        Figure("unit_trajectory_over_raw_dask", ratio["trajectory"], "ratio", goal=2.0, better="lower"),
        Figure("unit_group_over_raw_dask", ratio["group"], "ratio", goal=1.3, better="lower"),
        *(Figure(f"{side}_cpu_ms", median(values), "ms per trajectory") for side, values in cost.items()),
    ]


def _problem(ordinal: int) -> Problem:
    return Problem(ordinal, "trivial", ordinal, ordinal)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry: the last line always is JSON")
    quick = parser.parse_args().quick
    if "PREFECT_API_URL" not in os.environ:  # Prefect reads it when it is imported
        sys.exit(with_server(sys.argv[1:]))
    emit("orchestration", main(quick))
