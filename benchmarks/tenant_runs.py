"""One set of tenants' jobs on one service, from the first submission to the last commit, and what it cost.

Invariants: everything is read from the job book, the logs and what the service notes of its engines; the start of the
service is left out; a job that fails ends the benchmark.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import psutil
import yaml

from benchmarks.report import machine
from benchmarks.tenant_times import service_times
from benchmarks.whole_run import RunFailed
from flows.tenant_service import Tenants, load_service
from flows.tenants import find_service
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.records import Step
from rl.tenancy import busy
from sim.jobs import ServiceTimes

START_S, LIMIT_S = 300.0, 3600.0
LOOK_S = 0.5
TURN_S = (0.3, 0.6, 1.2)
"""Mean latency of a turn of each kind of environment; lognormal."""


@dataclass(frozen=True)
class Found:
    """One set of jobs on one service."""

    measured_s: float
    """From the first submission to the last commit."""
    seconds: float
    """The same, for as many jobs as are compared."""
    steps: int
    """In these seconds."""
    first_steps: list[float]
    """Time to first step of each tenant."""
    engine_busy: float
    """Share of the time."""
    trainer_busy: float
    processors_busy: float
    """Share of all cores of the machine, whoever used them."""
    rewards: list[list[float]]
    """Of each step, by tenant."""
    ends: list[float]
    """When each job's last step was committed, in seconds from the first submission."""
    rss_mb: float
    """Of all processes of the service, at most."""
    times: ServiceTimes
    error: float = 0.0
    """Of `seconds`, where not all jobs were run: a standard error, as a share."""

    @property
    def per_hour(self) -> float:
        return 3600 * self.steps / self.seconds

    @property
    def busy(self) -> float:
        """Of engine and trainer together."""
        return (self.engine_busy + self.trainer_busy) / 2

    @property
    def least_s(self) -> float:
        """No order of the same work on the same engine, trainer and cores takes less."""
        return self.seconds * max(self.engine_busy, self.trainer_busy, self.processors_busy)


def service_tree(name: str, most: int) -> dict[str, Any]:
    """A service with three lakes, for whom a very tiny base was warmed up on the first."""
    tree: dict[str, Any] = yaml.safe_load((Path("flows") / "presets" / "services" / "lake.yaml").read_text())
    plain = tree["domains"][0]
    lakes = [
        plain | {"name": f"lake-{kind}", "environment_options": options, "injection": {"step_latency": latency}}
        for kind, (options, latency) in enumerate(
            zip(
                ({"size": 3}, {"size": 4}, {"size": 4, "slip": 0.1}),
                ({"type": "lognormal", "median": s, "sigma": 0.5} for s in TURN_S),
                strict=True,
            )
        )
    ]
    return tree | {
        "name": name,
        "domains": [plain, *lakes],
        "engine": {"max_batch": 64},
        "pools": {"type": "local", "cpu": 8 * most + 32, "lambda": 8},
        "resident": most,
        "tracking": {"enabled": False},
    }


def job_tree(tenant: int, name: str, steps: int, alpha: int) -> dict[str, Any]:
    return {
        "tenant": f"t{tenant:02d}",
        "name": name,
        "seed": tenant,
        "domains": [f"lake-{tenant % len(TURN_S)}"],
        "lora": {"rank": (4, 8, 16)[tenant % 3]},
        "training": {"steps": steps, "groups_per_step": 2, "group_size": 4, "learning_rate": 1e-3,
                     "micro_batch_size": 64, "dynamic_sampling": False},
        "rollout": {"max_new_tokens": 8, "max_tokens": 384},
        "staleness": {"alpha": alpha},
    }  # fmt: skip


@contextmanager
def serving(tree: Mapping[str, Any], env: Mapping[str, str], home: Path) -> Iterator[tuple[Tenants, int]]:
    """The service, up, and the process that it is."""
    file, said = home / f"{tree['name']}.yaml", home / f"{tree['name']}.out"
    file.write_text(yaml.safe_dump(dict(tree)))
    with said.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "tenants", "serve", str(file)],
            env=dict(env), stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        end = time.monotonic() + START_S
        while "is up" not in said.read_text():
            if process.poll() is not None or time.monotonic() > end:
                raise RunFailed(f"{tree['name']} did not start: {said.read_text()[-2000:]}")
            time.sleep(LOOK_S)
        service = load_service(str(file))
        yield Tenants(find_service(ObjectStore.connect(service.store), service.name)), process.pid
    finally:
        process.terminate()  # SIGINT is ignored below a background job of a shell
        process.wait(120)


def measure(tenants: Tenants, pid: int, count: int, label: str, steps: int, alpha: int = 0) -> Found:
    """Hand `count` jobs in and follow them to their end. Raises RunFailed when one fails."""
    jobs = [job_tree(n, f"{label}-{count}", steps, alpha) for n in range(count)]
    before, used, began, rss = engine_busy(tenants), processor_s(), time.time(), 0.0
    for job in jobs:
        tenants.submit(job)
    ids = [f"{job['tenant']}/{job['name']}" for job in jobs]
    while any(tenants.job(id).state in ("waiting", "running") for id in ids):
        rss = max(rss, memory_mb(pid))
        if time.time() - began > LIMIT_S:
            raise RunFailed(f"{label} with {count} tenants did not end within {LIMIT_S:g} s")
        time.sleep(LOOK_S)
    used, watched = processor_s() - used, time.time() - began
    entries = [tenants.job(id) for id in ids]
    if failed := [entry for entry in entries if entry.state != "done"]:
        raise RunFailed(f"{failed[0].job.id} is {failed[0].state}: {failed[0].failure}")
    logs = {id: steps_of(tenants, id) for id in ids}
    end = max(records[-1].time for records in logs.values())
    seconds = end - min(entry.submitted for entry in entries)
    made = [step for records in logs.values() for step in records if step.version > 0]
    time.sleep(3.0)  # until the engines' time is noted
    found = Found(
        measured_s=seconds,
        seconds=seconds,
        steps=len(made),
        first_steps=[logs[e.job.id][1].time - e.submitted for e in entries],
        engine_busy=(engine_busy(tenants) - before) / seconds,
        trainer_busy=sum(map(busy, made)) / seconds,
        processors_busy=used / watched / machine()["cores"],
        rewards=[[step.metrics["reward"] for step in logs[id] if step.version > 0] for id in ids],
        ends=[logs[id][-1].time - min(entry.submitted for entry in entries) for id in ids],
        rss_mb=rss,
        times=service_times(ObjectStore.connect(tenants.service.store), tenants.service, entries, logs),
    )
    print(
        f"{label:12s} {count:3d} tenants  {found.seconds:7.1f} s  {found.per_hour:7.0f} steps/h  first step "
        f"{median(found.first_steps):6.1f} s (worst {max(found.first_steps):6.1f})  engine {found.engine_busy:4.0%}  "
        f"trainer {found.trainer_busy:4.0%}  cores {found.processors_busy:4.0%}  "
        f"reward {fmean(chain(*found.rewards)):.3f}  {found.rss_mb:6.0f} MB",
        flush=True,
    )
    print(f"{label} {count} stages: {json.dumps(asdict(found.times))}", flush=True)
    return found


def steps_of(tenants: Tenants, id: str) -> list[Step]:
    log = CommitLog(ObjectStore.connect(tenants.service.store), f"{id}/", "benchmark")
    return [record for record in log.history() if isinstance(record, Step)]


def engine_busy(tenants: Tenants) -> float:
    """Seconds since the service was started, as last noted."""
    store, key = ObjectStore.connect(tenants.service.store), f"{tenants.service.prefix}engines.json"
    end = time.monotonic() + START_S
    while not store.exists(key):
        if time.monotonic() > end:
            raise RunFailed(f"nothing is noted of the engines of {tenants.service.name}")
        time.sleep(LOOK_S)
    return float(json.loads(store.get(key))["busy_s"])


def processor_s() -> float:
    """Seconds of all cores since the machine was started in which they had work."""
    times = psutil.cpu_times()
    return float(times.user + times.system)


def memory_mb(pid: int) -> float:
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total / 2**20


def of_all(found: Found, most: int) -> Found:
    """What jobs that were run one at a time say of `most` of them: every job takes what its kind takes on average. What
    is busy for which share of the time stays. Wants as many jobs of each kind, two at least."""
    kinds, count = len(TURN_S), len(found.ends)
    if count == most:
        return found
    begins = [0.0, *found.ends[:-1]]
    took = [[found.ends[n] - begins[n] for n in range(kind, count, kinds)] for kind in range(kinds)]
    first = [[found.first_steps[n] - begins[n] for n in range(kind, count, kinds)] for kind in range(kinds)]
    jobs = [len(range(kind, most, kinds)) for kind in range(kinds)]
    until, first_steps = 0.0, []
    for tenant in range(most):
        first_steps.append(until + fmean(first[tenant % kinds]))
        until += fmean(took[tenant % kinds])
    error = math.sqrt(sum((n * stdev(one)) ** 2 / len(one) for n, one in zip(jobs, took, strict=True)))
    return replace(
        found, seconds=until, steps=found.steps * most // count, first_steps=first_steps, error=error / until
    )
