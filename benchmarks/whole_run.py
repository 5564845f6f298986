"""One whole run, as a user starts it, and what it cost: for benchmarks that compare runs.

Invariants: everything is read from what the run left in the store, and from the processor times of its processes; the
start of the run is left out, for only the steps after `first` count, and so is what comes after `last`; services are
the caller's and are not counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import monotonic, time

import psutil

from benchmarks.attainable import StepTimes
from flows.configure import load_config
from infra.services import supervisor
from infra.services.endpoints import environment
from infra.store.buffer import SampleBuffer
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from infra.tracking.plots import busy_intervals
from rl.config.run import RunConfig
from rl.records import Step
from rl.trajectory import Group, Span

LOOK_S = 1.0
"""Between two looks at the processes."""
SEGMENTS = 100_000


class RunFailed(Exception):
    """The run did not end well; the message is the end of what it said."""


@dataclass(frozen=True)
class Measured:
    """Per step, in seconds, over the steps that count."""

    config: RunConfig
    steps: int
    step_s: float
    tokens_per_s: float
    trajectories_per_s: float
    before: tuple[StepTimes, ...]
    """Each step from version 1 on that does not count ..."""
    counted: tuple[StepTimes, ...]
    """... and each that does."""
    cpu_s: float
    """Of all processes of the run."""
    busiest_s: float
    """Processor time of the busiest one alone."""
    busiest: str
    injected: float
    """Share of the trajectories' time that is latency added on purpose."""
    shares: dict[str, float]
    """Of the time that counts, that each stage was busy."""
    lag_mean: float
    lag_max: float
    reward: float
    """Mean of the last fifth of the steps."""
    wall_s: float
    """Of the run as a whole, start and evaluation included."""
    dropped: dict[str, int]

    @property
    def train_s(self) -> float:
        return fmean(step.train_s for step in self.counted)

    @property
    def slowest_s(self) -> float:
        """Of the slowest group of a batch, from its first reset to its last reward."""
        return fmean(max(step.groups) for step in self.counted)

    @property
    def group_s(self) -> float:
        """Of the mean group."""
        return fmean(seconds for step in self.counted for seconds in step.groups)


@contextmanager
def services() -> Iterator[dict[str, str]]:
    """An environment with a store and a Prefect server of its own, and a home that goes away with it."""
    with TemporaryDirectory(prefix="rollmill-benchmark-") as home:
        try:
            found = environment(supervisor.up(home, supervisor.AUTO, ["s3", "prefect"]))
            # tracking is off in these runs; the name keeps them from starting a server for it
            extra = {"ROLLMILL_HOME": home, "OMP_NUM_THREADS": "1", "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
            yield {**os.environ, **found, **extra, "PREFECT_LOGGING_LEVEL": "WARNING"}
        finally:
            supervisor.down(home)


def run(
    preset: str,
    sets: Sequence[str],
    env: Mapping[str, str],
    first: int = 2,
    last: int | None = None,
    limit_s: float = 3600,
) -> Measured:
    """Train to the end and measure the steps after version `first` up to `last`, or to the end. Raises RunFailed."""
    sets = [*sets, "tracking.enabled=false"]
    config = load_config(preset, sets)
    command = [sys.executable, "-m", "flows.cli", "train", preset]
    began = monotonic()
    process = subprocess.Popen(
        [*command, *(a for one in sets for a in ("--set", one))],
        env=dict(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    meter, said = Meter(), ""
    try:
        while True:
            try:
                said, _ = process.communicate(timeout=LOOK_S)
                break
            except subprocess.TimeoutExpired:
                meter.look(process.pid)
                if monotonic() - began > limit_s:
                    raise RunFailed(f"{config.name} did not end within {limit_s:g} s") from None
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise RunFailed(f"{config.name} ended with code {process.returncode}: {said[-2000:]}")
    with environ(env):
        return read(config, meter, first, last, monotonic() - began)


@contextmanager
def environ(env: Mapping[str, str]) -> Iterator[None]:
    """These variables, for the duration."""
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@dataclass
class Meter:
    """Processor time of a process and all below it, by process."""

    seen: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    names: dict[int, str] = field(default_factory=dict)

    def look(self, pid: int) -> None:
        try:
            family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for one in family:
            try:
                self.seen[one.pid].append((time(), sum(one.cpu_times()[:2])))
                self.names.setdefault(one.pid, _name(one.cmdline()))
            except psutil.Error:
                continue

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Seconds of processor time by process, from `begin` to `end` (epoch seconds)."""
        used: dict[str, float] = {}
        for pid, looks in self.seen.items():
            before = [cpu for at, cpu in looks if at <= begin]
            until = [cpu for at, cpu in looks if at <= end]
            if until:
                used[f"{self.names[pid]} ({pid})"] = until[-1] - (before[-1] if before else 0.0)
        return used


def _name(command: Sequence[str]) -> str:
    if "-m" in command[:-1]:
        return command[list(command).index("-m") + 1]
    return "Dask worker" if any("spawn_main" in part for part in command) else Path(command[0]).name if command else "?"


def read(config: RunConfig, meter: Meter, first: int, last: int | None, wall_s: float) -> Measured:
    """What a run that ended left behind."""
    store = ObjectStore.connect(config.store)
    log = CommitLog(store, config.prefix, writer="benchmark")
    steps = [r for r in log.history() if isinstance(r, Step) and (last is None or r.version <= last)]
    counted = [s for s in steps if s.version > first]
    begin, end = next(s.time for s in steps if s.version == first), counted[-1].time
    groups = {str(g.uid): g for g in SampleBuffer(store, config.prefix).history(SEGMENTS) if g.tombstone is None}
    batches = {s.version: [groups[uid] for uid in s.trained if uid in groups] for s in steps}
    members = [m for s in counted for g in batches[s.version] for m in g.members]
    made = {
        s.version: StepTimes(
            s.metrics["span_train_start"], s.metrics["span_train_end"], tuple(map(_lasted, batches[s.version]))
        )
        for s in steps
        if s.trained
    }
    n, whole = len(counted), end - begin
    spans = [span for m in members for span in m.spans]
    trainer = [
        Span(kind, s.metrics[f"span_{kind}_start"], s.metrics[f"span_{kind}_end"])
        for s in counted
        for kind in ("train", "push", "swap")
        if f"span_{kind}_start" in s.metrics
    ]
    used = meter.between(begin, end)
    busiest = max(used, key=lambda name: used[name])
    stages = defaultdict(list)
    for span in [*spans, *trainer]:
        stages[span.stage].append(Span(span.stage, max(span.start, begin), min(span.end, end)))
    playing = sum(max(s.end for s in m.spans) - min(s.start for s in m.spans) for m in members)
    rewards = [s.metrics["reward"] for s in counted if "reward" in s.metrics]
    log.sync()
    return Measured(
        config=config,
        steps=n,
        step_s=whole / n,
        tokens_per_s=sum(len(m.token_ids) for m in members) / whole,
        trajectories_per_s=len(members) / whole,
        before=tuple(made[v] for v in sorted(made) if v <= first),
        counted=tuple(made[v] for v in sorted(made) if v > first),
        cpu_s=sum(used.values()) / n,
        busiest_s=used[busiest] / n,
        busiest=busiest,
        injected=sum(s.end - s.start for s in spans if s.stage == "injected") / playing,
        shares={k: sum(b - a for a, b in busy_intervals(v)) / whole for k, v in sorted(stages.items())},
        lag_mean=fmean(s.metrics.get("lag_mean", 0.0) for s in counted),
        lag_max=max(s.metrics.get("lag_max", 0.0) for s in counted),
        reward=fmean(rewards[-max(1, n // 5) :]) if rewards else float("nan"),
        wall_s=wall_s,
        dropped=dict(log.ledger.dropped_groups),
    )


def _lasted(group: Group) -> float:
    """From the first reset to the last reward."""
    spans = [span for m in group.members for span in m.spans]
    return max(s.end for s in spans) - min(s.start for s in spans)


def warm_model(preset: str, sets: Sequence[str], env: Mapping[str, str]) -> str:
    """The warmed-up model of a preset, made once, as a directory; a run with one step makes it."""
    run(preset, ["name=warm", "training.steps=1", "evaluation.problems=0", *sets], env, first=0)
    return str(next(Path(env["ROLLMILL_HOME"]).glob("models/warm-*")))
