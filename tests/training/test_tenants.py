"""The tenants' trainer on a real store: jobs as if alone, failures that stay at home, comings and goings."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.services.endpoints import S3Endpoint
from infra.store.jobs import JobBook
from infra.store.log import CommitLog
from infra.store.reader import LogReader
from rl.config.run import RunConfig
from rl.jobs import State
from rl.records import Fence
from tests.training.market import Market, done
from tests.training.small import make_group

pytestmark = [pytest.mark.server, pytest.mark.slow]

LORAS: list[dict[str, Any]] = [
    {"rank": 4, "alpha": 8},
    {"rank": 2, "alpha": 2, "target_modules": ["q_proj", "down_proj"]},
    {"rank": 8, "alpha": 4, "target_modules": ["o_proj"], "dropout": 0.1},
]


@pytest.fixture
def market(s3: S3Endpoint, base: Path, tmp_path: Path) -> Iterator[Callable[..., Market]]:
    made: list[Market] = []

    def make(**changes: Any) -> Market:
        (work := tmp_path / str(len(made))).mkdir()
        made.append(Market(s3, base, work, **changes))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_jobs_that_exceed_memory_are_trained_as_if_alone(market: Callable[..., Market]) -> None:
    at = market(resident=1)
    jobs = [at.job(f"t{n}", lora=lora, seed=n) for n, lora in enumerate(LORAS)]
    runs = [at.begin(job) for job in jobs]
    at.train()
    assert done(at, *jobs)
    for job, run in zip(jobs, runs, strict=True):
        steps = at.steps(run)
        assert [s.version for s in steps] == [0, 1, 2, 3]
        assert [uid for s in steps for uid in s.trained] == [f"{i}.0" for i in range(9)]
        assert all(s.state.full for s in steps)
        assert sum(isinstance(record, Fence) for record in LogReader(at.store, run.prefix).records()) == 1
        assert at.hashes(run) == at.alone(job)
        assert set(at.proxy.by_tenant[job.id]) == {"suspend", "update", "resume", "prefetch"}
        for step in steps[1:]:
            figures = step.metrics
            assert figures["queue_s"] >= 0 and figures["span_queue_end"] <= figures["span_train_start"]
    restores = [step.metrics["restore_s"] for run in runs for step in at.steps(run) if "restore_s" in step.metrics]
    assert restores and min(restores) > 0
    status = json.loads(at.store.get(f"{at.service.prefix}trainers/0.json"))
    assert status["since"] <= status["time"]


def test_under_alpha_zero_each_rolls_out_under_its_own_head(market: Callable[..., Market]) -> None:
    at = market()
    jobs = [at.job(f"t{n}", staleness={"alpha": 0}, seed=n) for n in range(2)]
    runs: dict[str, RunConfig] = {}

    def roll(tenant: str, name: str, body: dict[str, Any]) -> None:
        if name == "resume":
            version = len(at.steps(runs[tenant])) - 1
            at.seal(runs[tenant], [make_group(10 * version + i, 4, version=version) for i in range(3)])

    at.proxy.tell = roll
    for job in jobs:
        runs[job.id] = at.begin(job, sealed=0)
    at.train()
    assert done(at, *jobs)
    for job in jobs:
        assert at.proxy.by_tenant[job.id] == ["suspend", "update", "resume"] * 3
        steps = at.steps(runs[job.id])
        assert [s.metrics["lag_max"] for s in steps[1:]] == [0, 0, 0]
        assert [s.trained[0] for s in steps[1:]] == ["0.0", "10.0", "20.0"]


def broken(rewards: list[float]) -> list[float]:
    raise LookupError("an advantage with a mistake")


def test_what_goes_wrong_with_a_job_ends_it_alone_and_says_why(market: Callable[..., Market]) -> None:
    at = market(foreign_code=True, deadlines={"batch": 2, "control": 1, "start": 1}, restarts={"trainer": 1})
    good = at.job("good", training={"steps": 4})
    bad = {
        "nan": at.job("nan", training={"advantage": "tests.training.test_main:huge"}),
        "raises": at.job("raises", training={"advantage": "tests.training.test_tenants:broken"}),
        "silent": at.job("silent"),
        "targets": at.job("targets", lora={"target_modules": ["nothing_like_it"]}),
        "refused": at.job("refused"),
    }
    runs = {name: at.begin(job, sealed=0 if name == "silent" else None) for name, job in bad.items()}
    at.proxy.refuses = {bad["refused"].id}
    kept = at.begin(good)
    at.train()
    reasons = {name: at.entry(job).failure or "" for name, job in bad.items()}
    assert reasons["nan"].startswith("TrainingDiverged: the gradient's norm is")
    assert reasons["raises"] == "LookupError: an advantage with a mistake"
    assert reasons["silent"].startswith("BatchTimeout: no new group for")
    assert reasons["targets"].startswith("AdapterUnusable: model.lora: the base can not carry this adapter")
    assert reasons["refused"].startswith("ControlRefused: ")
    assert [s.version for s in at.steps(runs["nan"])] == [0]
    assert at.entry(good).state is State.DONE and at.hashes(kept) == at.alone(good)


def test_a_paused_job_is_let_go_of_and_goes_on_bit_by_bit(market: Callable[..., Market]) -> None:
    at = market()
    stays, goes = at.job("stays", training={"steps": 6}), at.job("goes", seed=3)
    first, second = at.begin(stays), at.begin(goes, sealed=3)
    at.train(until=lambda book: len(at.steps(second)) == 2 and len(at.steps(first)) == 7)
    at.book.order(goes.id, "pause")
    calls: list[int] = []

    def pause(book: JobBook) -> bool:
        calls.append(0)
        return len(calls) > 20

    at.seal(second, [make_group(i, 4, seed=3) for i in range(3, 9)])
    at.train(until=pause)
    assert len(at.steps(second)) == 2
    at.book.order(goes.id, "resume")
    at.book.start(goes.id, 0)
    at.train()
    assert done(at, stays, goes)
    assert at.hashes(second) == at.alone(goes)


def test_an_operators_fence_is_no_other_trainer(market: Callable[..., Market]) -> None:
    at = market()
    job = at.job("anna")
    run = at.begin(job)
    fenced: list[int] = []

    def fence(tenant: str, name: str, body: dict[str, Any]) -> None:
        if (name, body.get("version")) == ("update", 2) and not fenced:
            fenced.append(CommitLog(at.store, run.prefix, "operator-here").fence())

    at.proxy.tell = fence
    at.train()
    assert fenced and done(at, job)
    assert at.hashes(run) == at.alone(job)


def test_a_job_that_another_process_took_is_left_to_it(market: Callable[..., Market]) -> None:
    at = market()
    taken, other = at.job("taken"), at.job("other", training={"steps": 5})
    run, _ = at.begin(taken), at.begin(other)
    fenced: list[int] = []

    def fence(tenant: str, name: str, body: dict[str, Any]) -> None:
        if tenant == taken.id and (name, body.get("version")) == ("update", 1) and not fenced:
            fenced.append(CommitLog(at.store, run.prefix, "trainer-elsewhere-1").fence())

    at.proxy.tell = fence
    at.train(until=lambda book: done(at, other))
    assert at.entry(taken).state is State.RUNNING
    assert CommitLog(at.store, run.prefix, "look").sync().fence == fenced[0]
    assert len(at.steps(run)) <= 3


KILLED = """
import os, signal
from infra.store.log import CommitLog
from infra.store.reader import LogReader
append = CommitLog.append_step
def die(self, **more):
    if self.ledger.next_version == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return append(self, **more)
CommitLog.append_step = die
"""


@pytest.mark.full
def test_a_killed_trainer_loses_and_doubles_nothing_of_anybody(market: Callable[..., Market]) -> None:
    at = market(resident=1)
    jobs = [at.job(f"t{n}", lora=lora, seed=n) for n, lora in enumerate(LORAS)]
    runs = [at.begin(job) for job in jobs]
    killed = at.trainer(prelude=KILLED)
    _, errors = killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL, errors
    again = at.trainer()
    try:
        at.wait()
    finally:
        again.terminate()
        again.communicate(timeout=60)
    assert again.returncode == 143
    assert done(at, *jobs)
    for job, run in zip(jobs, runs, strict=True):
        assert [uid for s in at.steps(run) for uid in s.trained] == [f"{i}.0" for i in range(9)]
        assert at.hashes(run) == at.alone(job)


@pytest.mark.full
def test_two_trainers_train_jobs_at_the_same_time(market: Callable[..., Market]) -> None:
    at = market(trainers=2)
    jobs = [at.job(f"t{n}", seed=n, training={"steps": 8}) for n in range(4)]
    runs = [at.begin(job, trainer=n % 2) for n, job in enumerate(jobs)]
    trainers = [at.trainer(number) for number in range(2)]
    try:
        at.wait()
    finally:
        for trainer in trainers:
            trainer.terminate()
        for trainer in trainers:
            trainer.communicate(timeout=60)
    assert done(at, *jobs)
    assert at.hashes(runs[3]) == at.alone(jobs[3])
    spans = [
        [(s.metrics["span_train_start"], s.metrics["span_train_end"]) for run in runs[n::2] for s in at.steps(run)[1:]]
        for n in range(2)
    ]
    assert any(a < d and c < b for a, b in spans[0] for c, d in spans[1])
