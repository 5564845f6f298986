"""A service's store, book and proxy, without its rollout: made-up groups are sealed for each job."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.proxy.auth import tenant_key
from infra.proxy.secret import CONTROL_KEY
from infra.services.endpoints import S3Endpoint
from infra.store.arrivals import Arrivals
from infra.store.buffer import SampleBuffer
from infra.store.directories import push_directory
from infra.store.jobs import JobBook
from infra.store.objects import ObjectStore
from infra.store.reader import LogReader
from infra.training.main import main
from infra.training.tenants import train
from rl.config.load import dumps
from rl.config.run import RunConfig
from rl.config.tenants import Job, ServiceConfig
from rl.jobs import LIVE, Entry, State
from rl.records import Step
from rl.trajectory import Group
from tests.training.scene import ROOT, NoteTaker
from tests.training.small import make_group

MASTER = "m" * 40
LAKE = {"name": "lake", "environment": "frozen_lake"}
TRAINING = {
    "steps": 3,
    "groups_per_step": 3,
    "group_size": 4,
    "learning_rate": 1e-2,
    "micro_batch_size": 4,
}


class Proxy(NoteTaker):
    """Knows whose key it was."""

    def __init__(self) -> None:
        self.by_tenant: dict[str, list[str]] = {}
        self.refuses: set[str] = set()
        """Updates of these tenants."""
        self.tell: Callable[[str, str, dict[str, Any]], object] = lambda tenant, name, body: None
        self.tenants: dict[str, str] = {}
        """By key."""
        super().__init__()

    def answer(self, key: str | None, name: str, body: dict[str, Any]) -> int:
        tenant = self.tenants[(key or "").removeprefix("Bearer ")]
        self.by_tenant.setdefault(tenant, []).append(name)
        self.tell(tenant, name, body)
        return 400 if name == "update" and tenant in self.refuses else super().answer(key, name, body)


class Market:
    """One service with a name of its own; trainers are processes, or this thread."""

    def __init__(self, s3: S3Endpoint, base: Path, work: Path, **changes: Any) -> None:
        store = {"bucket": s3.bucket, "endpoint_url": s3.endpoint_url, "region": s3.region}
        os.environ.update({"AWS_ACCESS_KEY_ID": s3.access_key, "AWS_SECRET_ACCESS_KEY": s3.secret_key})
        os.environ[CONTROL_KEY] = MASTER
        self.service = ServiceConfig.model_validate(
            {
                "name": f"s{uuid.uuid4().hex[:8]}",
                "model": {"source": {"type": "pretrained", "path": "unused"}},
                "domains": [LAKE],
                "rollout": {"max_new_tokens": 8, "max_tokens": 64},
                "tracking": {"enabled": False},
                "store": store,
                "pools": {"type": "local", "compute_gpu": 2},
                **changes,
            }
        )
        self.work = work
        self.store = ObjectStore.connect(self.service.store)
        self.proxy = Proxy()
        push_directory(self.store, self.service.prefix + "base/", base)
        self.book = JobBook(self.store, self.service.name)
        self.file = work / "service.json"
        self.file.write_text(dumps(self.service))
        self._arrivals, self._sealed = Arrivals(self.store, self.service.name), 0

    def job(self, tenant: str, name: str = "job", **changes: Any) -> Job:
        tree: dict[str, Any] = {
            # of its own, for others use the bucket too
            "tenant": f"{tenant}-{self.service.name}",
            "name": name,
            "domains": ["lake"],
            "rollout": {"max_new_tokens": 8, "max_tokens": 64},
            "staleness": {"alpha": 8},
            "lora": {"rank": 4, "alpha": 8},
        }
        tree |= {k: v for k, v in changes.items() if k != "training"}
        return Job.model_validate(tree | {"training": TRAINING | changes.get("training", {})})

    def begin(self, job: Job, trainer: int = 0, sealed: int | None = None) -> RunConfig:
        """Submitted and started, with groups for all its steps sealed (or `sealed` of them)."""
        config = job.run(self.service)
        self.proxy.tenants[tenant_key(MASTER, config.served_as)] = job.id
        self.book.submit(job)
        count = job.training.steps * job.training.groups_per_step if sealed is None else sealed
        self.seal(config, [make_group(i, job.training.group_size, seed=job.seed) for i in range(count)])
        self.book.start(job.id, trainer)
        return config

    def seal(self, config: RunConfig, groups: list[Group]) -> None:
        buffer = SampleBuffer(self.store, config.prefix)
        for at in range(0, len(groups), 3):
            buffer.seal(groups[at : at + 3], "rollout", self._sealed)
            self._sealed += 1
        self._arrivals.tell({f"{config.tenant}/{config.name}": self._sealed})

    def entry(self, job: Job) -> Entry:
        return JobBook(self.store, self.service.name).sync().entry(job.id)

    def steps(self, config: RunConfig) -> list[Step]:
        records = LogReader(self.store, config.prefix).records()
        return [record for record in records if isinstance(record, Step)]

    def hashes(self, config: RunConfig) -> list[str]:
        return [step.weights_sha256 for step in self.steps(config)]

    def alone(self, job: Job) -> list[str]:
        """The same job's hashes in a run of its own, on equal batches."""
        twin = job.model_copy(update={"name": f"{job.name}-alone"})
        config = twin.run(self.service)
        self.seal(
            config,
            [make_group(i, 4, seed=job.seed) for i in range(job.training.steps * job.training.groups_per_step)],
        )
        (work := self.work / config.prefix).mkdir(parents=True)
        (work / "config.json").write_text(dumps(config))
        self.proxy.tenants[MASTER] = twin.id
        assert main([str(work / "config.json"), "--proxy-url", self.proxy.url]) == 0
        return self.hashes(config)

    # -- trainers ----------------------------------------------------------------------------------------

    def train(self, until: Callable[[JobBook], bool] | None = None, deadline_s: float = 60) -> None:
        """A trainer in this thread until the book says so: as a rule, until no job is live."""
        stop, late = threading.Event(), threading.Event()

        def watch() -> None:
            book, end = JobBook(self.store, self.service.name), time.monotonic() + deadline_s
            while not stop.wait(0.1):
                jobs = book.sync()
                if until(book) if until is not None else not jobs.of(*LIVE):
                    stop.set()
                elif time.monotonic() > end:
                    late.set()
                    stop.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            train(self.service, 0, self.proxy.url, self.work, stop)
        finally:
            stop.set()
            watcher.join()
        assert not late.is_set(), {id: (e.state, e.failure) for id, e in self.book.sync().entries.items()}

    def trainer(self, number: int = 0, prelude: str = "") -> subprocess.Popen[str]:
        """A trainer's process; `prelude` is Python run before its main."""
        script = (
            f"import signal, sys\n{prelude}\nfrom infra.training.tenants import main\n"
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\nsys.exit(main(sys.argv[1:]))"
        )
        given = [str(self.file), "--trainer", str(number), "--proxy-url", self.proxy.url]
        return subprocess.Popen(
            [sys.executable, "-c", script, *given],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self, deadline_s: float = 90) -> None:
        """Until no job is live."""
        end = time.monotonic() + deadline_s
        while self.book.sync().of(*LIVE):
            assert time.monotonic() < end, {id: (e.state, e.failure) for id, e in self.book.jobs.entries.items()}
            time.sleep(0.2)

    def close(self) -> None:
        self.proxy.close()


def done(market: Market, *jobs: Job) -> bool:
    return all(market.entry(job).state is State.DONE for job in jobs)
