"""A long run under faults: whether memory, open files and Prefect's database stay flat.

    python -m benchmarks.soak [--minutes 60] [--seed 0] --json

A real run (`benchmarks.crash.real`) loses one of its processes about every 20 seconds, never the driver. Sampled are
the processes that live as long as it does: the driver (with Dask's scheduler), the S3 server and Prefect's server. The
first fifth, in which everything grows to its size, is left out; `growth` is the median of the last third over that of
the first third of the rest. Prefect's database grows with what it is told, until its retention deletes old flow runs:
its figure is bytes per version. At the end the driver is killed, the run resumed to a natural end, the store audited.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
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

PARTS = (*VICTIMS, "engine", "worker")
BETWEEN_S = (5.0, 35.0)
SAMPLE_S = 5.0


class Meter:
    """Memory (MB) and open files of the lasting processes, by name."""

    def __init__(self, home: Path, env: Mapping[str, str], driver: psutil.Process) -> None:
        lasting, port = {"driver": driver}, urlsplit(env["PREFECT_API_URL"]).port
        for process in psutil.process_iter(["cmdline"]):
            command = " ".join(process.info["cmdline"] or ())
            if str(home) in command and "weed" in command:
                lasting["s3"] = process
            elif f"prefect server start --host 127.0.0.1 --port {port}" in command:
                lasting["prefect"] = process
        self._lasting = lasting
        self.memory: dict[str, list[float]] = defaultdict(list)
        self.files: dict[str, list[float]] = defaultdict(list)

    def look(self) -> None:
        for name, process in self._lasting.items():
            self.memory[name].append(process.memory_info().rss / 1e6)
            self.files[name].append(float(process.num_fds()))


def growth(samples: Sequence[float]) -> float:
    """The last third over the first one, once what is started has its size."""
    settled = samples[len(samples) // 5 :]
    third = max(1, len(settled) // 3)
    return median(settled[-third:]) / median(settled[:third])


def database_bytes(home: Path) -> float:
    return float(sum(path.stat().st_size for path in home.rglob("prefect.db*")))


def main(minutes: float, seed: int) -> list[Figure]:
    chance = Random(seed)
    with services() as (home, env):
        live = Run(home, env)
        try:
            live.begin()
            driver = live.find("driver")
            assert driver is not None
            meter, end, kills = Meter(home, env, driver), monotonic() + 60 * minutes, 0
            first, begun = live.head(), database_bytes(home)
            blow = monotonic() + chance.uniform(*BETWEEN_S)
            while monotonic() < end:
                live.watch(SAMPLE_S)
                meter.look()
                if monotonic() > blow:
                    part = chance.choice(PARTS)
                    kills += live.kill(part)
                    print(f"version {live.head()}: killed {part}", flush=True)
                    blow = monotonic() + chance.uniform(*BETWEEN_S)
            versions, grown = live.head() - first, database_bytes(home) - begun
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
        *(Figure(f"{name}_memory_mb", s[-1], "MB") for name, s in meter.memory.items()),
        Figure("prefect_database_bytes_per_version", grown / max(1, versions), "bytes"),
        Figure("findings", len(found.findings), "of the audit", 0),
        Figure("outlived", len(left), "processes", 0),
    ]


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
