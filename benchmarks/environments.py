"""What the environment manager adds to a call of an environment.

    python -m benchmarks.environments [--quick] --json

The same episodes are played on bare environments and through the manager, in turns within one run, `AT_ONCE` of them
on one event loop as in a worker; between two calls the policy takes its time, as a model does. The overhead is the
difference of the median wall time of a call, and of the CPU time per call. `blocking` is the same environment as a
SyncEnvironment.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from statistics import median
from time import perf_counter, process_time

from benchmarks.report import Figure, emit
from envs.calculator import Calculator
from envs.protocol import Environment, Step, SyncEnvironment
from rl.config.load import validate
from rl.stream import derive_seed
from rl.trajectory import Message, Problem
from tasks.environments import EnvironmentManager

AT_ONCE = 64
THINKING_S = 0.5
"""Mean time of the policy between two calls."""
GOAL_MS = 5.0


class Blocking(SyncEnvironment):
    """The calculator as code that blocks would be written."""

    def __init__(self) -> None:
        self.within = Calculator()

    def reset_sync(self, problem: Problem) -> list[Message]:
        return asyncio.run(self.within.reset(problem))

    def step_sync(self, action: str) -> Step:
        return asyncio.run(self.within.step(action))

    def expert_action(self) -> str:
        return self.within.expert_action()


class Times:
    """Seconds of every call, and of CPU time altogether."""

    def __init__(self) -> None:
        self.cpu = 0.0
        self.resets: list[float] = []
        self.steps: list[float] = []


async def bare(environment: Environment, problem: Problem, think: random.Random, times: Times) -> None:
    start = perf_counter()
    await environment.reset(problem)
    times.resets.append(perf_counter() - start)
    ended = False
    while not ended:
        await asyncio.sleep(think.expovariate(1 / THINKING_S))
        action, start = environment.expert_action(), perf_counter()
        ended = (await environment.step(action)).terminated
        times.steps.append(perf_counter() - start)


async def managed(manager: EnvironmentManager, problem: Problem, think: random.Random, times: Times) -> None:
    key, start = str(problem.ordinal), perf_counter()
    await manager.park(key, problem)
    live = await manager.claim(key, problem)
    times.resets.append(perf_counter() - start)
    ended = False
    while not ended:
        await asyncio.sleep(think.expovariate(1 / THINKING_S))
        action, start = live.environment.expert_action(), perf_counter()
        ended = (await manager.step(live, action)).terminated
        times.steps.append(perf_counter() - start)
    await manager.release(live)


async def round_of(manager: EnvironmentManager | None, kind: str, episodes: int, seed: int) -> Times:
    """Episodes of one round, each starting at a time of its own."""
    times, make = Times(), {"async": Calculator, "blocking": Blocking}[kind]

    async def slot(at: int) -> None:
        think = random.Random(f"{seed}/{at}")
        for ordinal in range(at, episodes, AT_ONCE):
            await asyncio.sleep(think.expovariate(1 / THINKING_S))
            problem = Problem(ordinal, kind, ordinal, derive_seed(seed, ordinal))
            if manager is None:
                await bare(make(), problem, think, times)
            else:
                await managed(manager, problem, think, times)

    start = process_time()
    await asyncio.gather(*(slot(at) for at in range(AT_ONCE)))
    times.cpu = process_time() - start
    return times


async def measure(rounds: int, episodes: int) -> list[Figure]:
    spec = {"async": "calculator", "blocking": f"{__spec__.name if __spec__ else __name__}:Blocking"}
    config = validate(
        {
            "name": "benchmark",
            "model": {"source": {"type": "pretrained", "path": "unused"}},
            "domains": [{"name": name, "environment": at} for name, at in spec.items()],
        },
        "benchmark",
    )
    figures = []
    for kind in spec:
        added: dict[str, list[float]] = {"reset": [], "step": [], "cpu": []}
        for seed in range(rounds):
            manager = EnvironmentManager(config)
            await managed(manager, Problem(0, kind, 0, 0), random.Random(0), Times())  # imports, preparation
            without, through = await round_of(None, kind, episodes, seed), await round_of(manager, kind, episodes, seed)
            await manager.close()
            added["reset"].append(median(through.resets) - median(without.resets))
            added["step"].append(median(through.steps) - median(without.steps))
            added["cpu"].append((through.cpu - without.cpu) / (len(through.resets) + len(through.steps)))
        figures += [
            Figure(f"{kind}_{call}_overhead_ms", median(seconds) * 1000, "ms", GOAL_MS)
            for call, seconds in added.items()
        ]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="the last line is JSON (always so)")
    chosen = parser.parse_args()
    rounds, episodes = (2, 192) if chosen.quick else (5, 512)
    emit("environments", asyncio.run(measure(rounds, episodes)))


if __name__ == "__main__":
    main()
