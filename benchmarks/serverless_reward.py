"""Rewards on dedicated workers against rewards as functions, under the same load in one run.

A step is a rollout, in which trajectories end one by one and are scored at once, and a training phase, in which none
ends. Rollout and training are stand-ins (time passes); scoring is the product's own: threads as the slots of a
`lambda` worker, or functions in processes behind the local endpoint. Two loads: `burst`, where all end in the last
tenth of the rollout, as members do that are decoded in one batch, and `spread`, where they end all over it.

Dedicated is the smallest pool whose p95 wait for a slot is under 5 % of the step: allocated for as long as its steps
last. Functions are allocated while they are billed, as their own REPORT lines say. Utilisation is the time inside the
reward over what is allocated. Both take their steps in turns, and the first of each is not counted: it starts the
processes. A step's figure is the median. What the freed workers could do instead is not counted, and is where the
paper's shorter steps come from.

    python -m benchmarks.serverless_reward [--quick] --json
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.report import Figure, emit
from rewards.protocol import TrajectoryView
from rl.config.load import validate
from rl.errors import RollmillError
from rl.trajectory import Message, Problem, Status
from tasks.functions import RewardScorer

REWARD = "benchmarks.waiting_reward:waiting"
ALLOWED_WAIT = 0.05
"""Share of a step that the p95 wait may take."""
POOLS = 4
"""Sizes that are tried, from what arithmetic says on."""
VIEW = TrajectoryView(Problem(0, "d", 0, 0), [Message("user", "q" * 2000)], Status.TERMINATED, 1, 1, 0.0, {})
_BILLED = re.compile(r"Billed Duration: (\d+) ms")


class TooBusy(RollmillError):
    """No pool is good enough on this machine now."""


@dataclass(frozen=True)
class Load:
    """One step's work, in seconds."""

    ends: tuple[float, ...]
    """When each trajectory ends, from the beginning of the rollout."""
    rollout: float
    train: float
    service: float
    """Of one reward."""

    @property
    def step(self) -> float:
        return self.rollout + self.train


class Side:
    """Steps that are scored in `slots` threads by one scorer, in seconds."""

    def __init__(self, scorer: RewardScorer, slots: int):
        self.scorer, self.slots = scorer, slots
        self.forget()

    def forget(self) -> None:
        """What was measured so far."""
        self.steps: list[float] = []
        self.waits: list[float] = []
        self.busy = self.allocated = 0.0

    @property
    def step(self) -> float:
        return median(self.steps)

    @property
    def utilisation(self) -> float:
        return self.busy / self.allocated

    def take(self, load: Load, pool: ThreadPoolExecutor) -> None:
        """One more step."""
        domain, began, ended = self.scorer.config.domain("d"), time.perf_counter(), time.time()
        scored = []
        for end in load.ends:
            time.sleep(max(0.0, began + end - time.perf_counter()))
            scored.append((time.time(), pool.submit(self.scorer.score, domain, VIEW)))
        parts = [(at, future.result()) for at, future in scored]
        time.sleep(max(0.0, began + load.rollout - time.perf_counter()) + load.train)
        self.steps.append(time.time() - ended)
        self.waits += [part["began"] - at for at, part in parts]
        self.busy += sum(part["busy"] for _, part in parts)


def make_load(members: int, rollout: float, train: float, service: float, last: float, seed: int) -> Load:
    """`members` trajectories that end at random in the last part of the rollout (a share of it)."""
    draw = random.Random(seed)
    ends = sorted(rollout * (1 - last * draw.random()) for _ in range(members))
    return Load(tuple(ends), rollout, train, service)


def waits(load: Load, slots: int) -> list[float]:
    """What each trajectory waits for one of so many slots, first come, first served."""
    free = [0.0] * slots
    found = []
    for end in load.ends:
        at = min(range(slots), key=free.__getitem__)
        start = max(end, free[at])
        free[at] = start + load.service
        found.append(start - end)
    return found


def p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


def smallest_pool(load: Load) -> int:
    """Slots of the smallest pool whose p95 wait is under ALLOWED_WAIT of the step."""
    return next(n for n in range(1, len(load.ends) + 1) if p95(waits(load, n)) < ALLOWED_WAIT * load.step)


def play(load: Load, dedicated: Side, functions: Side, steps: int, billed: Callable[[], float]) -> None:
    """A step of each that is not counted, then `steps` of each, in turns."""
    with ThreadPoolExecutor(dedicated.slots) as workers, ThreadPoolExecutor(functions.slots) as calls:

        def take(count: int) -> None:
            for _ in range(count):
                dedicated.take(load, workers)
                functions.take(load, calls)

        take(1)
        dedicated.forget()
        functions.forget()
        before = billed()
        take(steps)
    dedicated.allocated = dedicated.slots * sum(dedicated.steps)
    functions.allocated = billed() - before


def measured(load: Load, steps: int, here: RewardScorer, there: RewardScorer, log: Path) -> tuple[Side, Side]:
    """The smallest pool that is good enough, as measured, and the functions beside it: where the arithmetic's pool is
    not, the next ones are tried. Raises TooBusy."""

    def billed() -> float:
        return sum(int(ms) for ms in _BILLED.findall(log.read_text())) / 1000 if log.exists() else 0.0

    first = smallest_pool(load)
    for slots in range(first, first + POOLS):
        dedicated, functions = Side(here, slots), Side(there, len(load.ends) // 4)
        play(load, dedicated, functions, steps, billed)
        if p95(dedicated.waits) < ALLOWED_WAIT * dedicated.step:
            return dedicated, functions
    raise TooBusy(
        f"{slots} slots still wait {p95(dedicated.waits):.2f} s, where {first} should be enough: the machine does "
        "something else; measure again when it is quiet"
    )


def config_of(load: Load, serverless: dict[str, Any] | None) -> Any:
    domain = {"name": "d", "environment": "none", "reward": REWARD, "reward_options": {"seconds": load.service}}
    model = {"source": {"type": "pretrained", "path": "unused"}}
    return validate({"name": "b", "model": model, "domains": [domain], "serverless": serverless}, "benchmark")


def compare(load: Load, steps: int, prefix: str = "") -> list[Figure]:
    """The same load both ways; goals only without a prefix."""
    with TemporaryDirectory() as directory:
        home = Path(directory)
        there = RewardScorer(config_of(load, {"type": "local", "concurrency": len(load.ends) // 4}), home)
        try:
            here = RewardScorer(config_of(load, None), home)
            local, remote = measured(load, steps, here, there, home / "logs" / "waiting.log")
        finally:
            there.close()
    goals = prefix == ""
    ratios = remote.utilisation / local.utilisation, remote.step / local.step
    return [
        Figure(f"{prefix}dedicated_slots", local.slots, "slots"),
        Figure(f"{prefix}dedicated_utilisation", local.utilisation, "busy/allocated"),
        Figure(f"{prefix}serverless_utilisation", remote.utilisation, "busy/allocated"),
        Figure(f"{prefix}dedicated_p95_wait", p95(local.waits), "s"),
        Figure(f"{prefix}serverless_p95_wait", p95(remote.waits), "s"),
        Figure(f"{prefix}dedicated_step", local.step, "s"),
        Figure(f"{prefix}serverless_step", remote.step, "s"),
        Figure(f"{prefix}utilisation_ratio", ratios[0], "x", 6.0 if goals else None, "higher"),
        Figure(f"{prefix}step_time_ratio", ratios[1], "x", 1.05 if goals else None),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one counted step of each instead of three")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the last line is JSON anyway")
    steps = 1 if parser.parse_args().quick else 3
    burst, spread = (make_load(64, rollout=10.0, train=5.0, service=0.2, last=last, seed=0) for last in (0.1, 1.0))
    emit("serverless_reward", compare(burst, steps) + compare(spread, steps, "spread_"))


if __name__ == "__main__":
    main()
