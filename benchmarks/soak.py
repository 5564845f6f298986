"""A long run under faults: whether memory, open files and Prefect's database stay flat.

    python -m benchmarks.soak [--minutes 60] [--seed 0] --json

A real run (`benchmarks.crash.real`) loses one of its processes about every 20 seconds, never the driver, and not before
it made good the loss before: each is followed by a new version within `PATIENCE_S`, or the run has failed. Sampled are
the processes that live as long as it does: the driver (with Dask's scheduler), the S3 server, Prefect's server; and
Prefect's database, which grows until the first events of task runs are old enough to go (twenty minutes). The trainer,
the rollout flow and the engine are spared in turn, each for a third of the time, in which it is sampled, too. `growth`
leaves out the first fifth of the samples, in which everything grows to its size, and sets the median of the last third
of the rest over that of the first third. At the end the driver is killed, the run resumed to a natural end, the store
audited.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from statistics import median
from time import monotonic
from urllib.parse import urlsplit

import psutil

from benchmarks.crash.real import PREFIX, VICTIMS, Run, services
from benchmarks.report import Figure, emit
from infra.store.audit import audit
from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection
from rl.errors import DeadlineExceeded

PARTS = (*VICTIMS, "engine", "worker")
SPARED = {
    "trainer": {"trainer", "learn", "worker"},
    "rollout": {"rollout"},
    "engine": {"engine"},
}
"""Who is watched, and what it would die of."""
TASK_RUNS = 500
"""`retention.task_runs`: so few that the database has its size early in the hour."""
BETWEEN_S = (5.0, 35.0)
PATIENCE_S = 300.0
SAMPLE_S = 5.0


class Meter:
    """Memory (MB) and open files of processes by name, and the size (MB) of Prefect's database."""

    def __init__(self, home: Path, env: Mapping[str, str], driver: psutil.Process) -> None:
        self._database = home / "prefect"
        self._processes, port = {"driver": driver}, urlsplit(env["PREFECT_API_URL"]).port
        for process in psutil.process_iter(["cmdline"]):
            command = " ".join(process.info["cmdline"] or ())
            if str(home) in command and "weed" in command:
                self._processes["s3"] = process
            elif f"prefect server start --host 127.0.0.1 --port {port}" in command:
                self._processes["prefect"] = process
        self.memory: dict[str, list[float]] = defaultdict(list)
        self.files: dict[str, list[float]] = defaultdict(list)
        self.database: list[float] = []

    def look(self) -> None:
        for name, process in self._processes.items():
            with suppress(psutil.NoSuchProcess):
                memory, files = process.memory_info().rss / 1e6, float(process.num_fds())
                self.memory[name].append(memory)
                self.files[name].append(files)
        self.database.append(sum(path.stat().st_size for path in self._database.glob("prefect.db*")) / 1e6)

    def watch(self, name: str, process: psutil.Process | None) -> None:
        """Look at this one, too, from now on; None: it is not there just now. Another one of the same name than
        before begins anew."""
        if process is not None and self._processes.get(name) != process:
            self._processes[name] = process
            self.memory.pop(name, None)
            self.files.pop(name, None)

    def leave(self, name: str) -> None:
        self._processes.pop(name, None)


def growth(samples: Sequence[float]) -> float:
    """The last third over the first one, once what is started has its size."""
    settled = samples[len(samples) // 5 :]
    third = max(1, len(settled) // 3)
    return median(settled[-third:]) / median(settled[:third])


def main(minutes: float, seed: int) -> list[Figure]:
    chance = Random(seed)
    with services() as (home, env):
        live = Run(home, env, f"retention.task_runs={TASK_RUNS}")
        try:
            live.begin()
            driver = live.find("driver")
            assert driver is not None
            meter, kills, first = Meter(home, env, driver), 0, live.head()
            for spared, deadly in SPARED.items():
                kills += disturb(live, meter, chance, 60 * minutes / len(SPARED), spared, deadly)
            versions = live.head() - first
            live.kill("driver")
            steps = live.head() + 2
            live.start(steps, resume=True)
            live.wait()
        finally:
            left = live.stop()
        found = audit(ObjectStore.connect(StoreSection()), PREFIX, live.witnessed)
    for finding in found.findings:
        print(finding, flush=True)
    return [
        Figure("minutes", minutes, "minutes"),
        Figure("kills", kills, "processes killed"),
        Figure("versions", versions, "commits"),
        *(Figure(f"{name}_memory_growth", growth(s), "ratio", 1.15) for name, s in meter.memory.items()),
        *(Figure(f"{name}_files_growth", growth(s), "ratio", 1.15) for name, s in meter.files.items()),
        Figure("prefect_database_growth", growth(meter.database), "ratio", 1.15),
        *(Figure(f"{name}_memory_mb", s[-1], "MB") for name, s in meter.memory.items()),
        Figure("prefect_database_mb", meter.database[-1], "MB"),
        Figure("findings", len(found.findings), "of the audit", 0),
        Figure("outlived", len(left), "processes", 0),
    ]


def disturb(live: Run, meter: Meter, chance: Random, seconds: float, spared: str, deadly: Collection[str]) -> int:
    """Kill now and then a part that is not `deadly` to the `spared` one, which is watched; how many were killed.
    Raises DeadlineExceeded."""
    end, kills, struck = monotonic() + seconds, 0, live.head() - 1
    blow = monotonic() + chance.uniform(*BETWEEN_S)
    while monotonic() < end:
        live.watch(SAMPLE_S)
        meter.watch(spared, live.find(spared))
        meter.look()
        if monotonic() > blow and live.head() > struck:
            part, struck = chance.choice([part for part in PARTS if part not in deadly]), live.head()
            kills += live.kill(part)
            print(f"version {struck}: killed {part}, database {meter.database[-1]:.1f} MB", flush=True)
            blow = monotonic() + chance.uniform(*BETWEEN_S)
        elif monotonic() > blow + PATIENCE_S:
            raise DeadlineExceeded(f"no version after {struck} within {PATIENCE_S:g} s of a kill")
    meter.leave(spared)
    return kills


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry: the last line always is JSON")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures = main(arguments.minutes, arguments.seed)
    emit("soak", figures)
    sys.exit(any(figure.met is False for figure in figures))
