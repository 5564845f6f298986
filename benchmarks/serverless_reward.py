"""Rewards on dedicated workers against rewards as functions, under the same load in one run.

A step is a rollout, in which trajectories end one by one and are scored at once, and a training phase, in which none
ends. Rollout and training are stand-ins (time passes); scoring is the product's own: threads as the slots of a
`lambda` worker, or functions in processes behind the local endpoint. Two loads: `burst`, where all end in the last
tenth of the rollout, as members do that are decoded in one batch, and `spread`, where they end all over it.

Dedicated is the smallest pool whose p95 wait for a slot is under 5 % of the step: allocated for as long as the run
lasts. Functions are allocated while they are billed, as their own REPORT lines say. Utilisation is the time inside the
reward over what is allocated. The first step of each is not counted: it starts the processes. What the freed workers
could do instead is not counted either, and is where the paper's shorter steps come from.

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
from functools import partial
from itertools import count
from operator import mul
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.report import Figure, emit
from rewards.protocol import TrajectoryView
from rl.config.load import validate
from rl.trajectory import Message, Problem, Status
from tasks.functions import RewardScorer

REWARD = "benchmarks.waiting_reward:waiting"
ALLOWED_WAIT = 0.05
"""Share of a step that the p95 wait may take."""
_BILLED = re.compile(r"Billed Duration: (\d+) ms")


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


@dataclass(frozen=True)
class Measured:
    """Over all counted steps, in seconds."""

    steps: list[float]
    waits: list[float]
    busy: float
    allocated: float

    @property
    def step(self) -> float:
        return sum(self.steps) / len(self.steps)

    @property
    def utilisation(self) -> float:
        return self.busy / self.allocated


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


def play(load: Load, scorer: RewardScorer, slots: int, steps: int, allocated: Callable[[float], float]) -> Measured:
    """A step that is not counted, then `steps`, scored in `slots` threads; `allocated` tells, from the wall time of the
    counted steps, what was."""
    view = TrajectoryView(Problem(0, "d", 0, 0), [Message("user", "q" * 2000)], Status.TERMINATED, 1, 1, 0.0, {})
    domain = scorer.config.domain("d")
    took: list[float] = []
    waited: list[float] = []
    busy, before = 0.0, 0.0
    with ThreadPoolExecutor(slots) as pool:
        for step in range(steps + 1):
            if step == 1:
                before = allocated(0.0)
            began, ended = time.perf_counter(), time.time()
            scored = []
            for end in load.ends:
                time.sleep(max(0.0, began + end - time.perf_counter()))
                scored.append((time.time(), pool.submit(scorer.score, domain, view)))
            parts = [(at, future.result()) for at, future in scored]
            time.sleep(max(0.0, began + load.rollout - time.perf_counter()) + load.train)
            if step:
                took.append(time.time() - ended)
                waited += [part["began"] - at for at, part in parts]
                busy += sum(part["busy"] for _, part in parts)
    return Measured(took, waited, busy, allocated(sum(took)) - before)


def dedicated(load: Load, scorer: RewardScorer, steps: int) -> tuple[int, Measured]:
    """The smallest pool that is good enough, as measured: where the arithmetic's is not, the next one is tried."""
    for slots in count(smallest_pool(load)):
        measured = play(load, scorer, slots, steps, partial(mul, slots))
        if p95(measured.waits) < ALLOWED_WAIT * measured.step:
            return slots, measured
    raise AssertionError("count never ends")


def config_of(load: Load, serverless: dict[str, Any] | None) -> Any:
    domain = {"name": "d", "environment": "none", "reward": REWARD, "reward_options": {"seconds": load.service}}
    model = {"source": {"type": "pretrained", "path": "unused"}}
    return validate({"name": "b", "model": model, "domains": [domain], "serverless": serverless}, "benchmark")


def compare(load: Load, steps: int, prefix: str = "") -> list[Figure]:
    """The same load both ways; goals only without a prefix."""
    with TemporaryDirectory() as directory:
        home = Path(directory)
        slots, local = dedicated(load, RewardScorer(config_of(load, None), home), steps)
        at_once = len(load.ends) // 4
        functions = RewardScorer(config_of(load, {"type": "local", "concurrency": at_once}), home)
        log = home / "logs" / "waiting.log"

        def billed(_: float) -> float:
            return sum(int(ms) for ms in _BILLED.findall(log.read_text())) / 1000

        try:
            remote = play(load, functions, at_once, steps, billed)
        finally:
            functions.close()
    goals = prefix == ""
    ratios = remote.utilisation / local.utilisation, remote.step / local.step
    return [
        Figure(f"{prefix}dedicated_slots", slots, "slots"),
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
