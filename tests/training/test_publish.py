"""Publishing beside training: what may happen before the record stands, in which order, and how it fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.services.endpoints import S3Endpoint
from infra.store.errors import StoreUnavailable
from infra.store.log import CommitLog
from infra.store.weights import WeightStore
from infra.training import metrics
from infra.training.batches import Batch, Batches, BatchTimeout
from infra.training.publish import Checkpoints, Publisher, PublishTimeout, Version
from infra.training.snapshot import Snapshots
from infra.training.swap import Engines
from rl.errors import Fenced, ProtocolViolation
from rl.ledger import Ledger
from rl.protocol import Phase, StepProtocol
from rl.records import Reason, Settle
from tests.training.scene import Scene
from tests.training.small import hash_of, make_group, make_trainer
from tests.training.test_batches import Time

pytestmark = pytest.mark.server


class Gate(Checkpoints):
    """Pushes when it is opened; or fails."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reached, self.open = threading.Event(), threading.Event()
        self.failure: Exception | None = None

    def push(self, *args: Any) -> Any:
        self.reached.set()
        assert self.open.wait(30)
        if self.failure is not None:
            raise self.failure
        return super().push(*args)


class Control:
    """Notes calls with the head of the log at that moment."""

    def __init__(self, log: Callable[[], CommitLog]) -> None:
        self.calls: list[tuple[str, int | None, int | None]] = []
        self._log = log

    def _note(self, name: str, version: int | None = None) -> None:
        self.calls.append((name, version, self._log().ledger.head))

    def suspend(self) -> None:
        self._note("suspend")

    def prefetch(self, version: int) -> None:
        self._note("prefetch", version)

    def update(self, version: int, oldest_viable: int) -> None:
        self._note("update", version)

    def resume(self) -> None:
        self._note("resume")

    def named(self, *names: str) -> list[tuple[str, int | None, int | None]]:
        return [call for call in self.calls if call[0] in names]


class Tracker:
    def log_step(self, *_: Any) -> None: ...

    def log_version(self, *_: Any) -> None: ...


class Stage:
    """One run with a committed version 0, twelve sealed groups and a publisher whose gate is closed."""

    def __init__(self, run: Scene, base: Path, groups: int = 12, **options: Any) -> None:
        self.run, self.log = run, run.log("trainer")
        self.log.fence()
        self.version_0 = run.commit(self.log)
        run.seal_many(groups, **options)
        self.control = Control(run.log)
        self.gate = Gate(run.config, WeightStore(run.store), base, run.work)
        self.engines = Engines(self.control, deadline_s=5)
        protocol = StepProtocol(run.config.staleness.alpha, run.config.mode.eager)
        self.publisher = Publisher(run.config, self.log, self.gate, self.engines, Tracker(), protocol)
        self.model = make_trainer(run.config, base, run.work / "trl", [])[0].model
        self.snapshots = Snapshots()
        self.time = Time()
        self.batches: Batches = run.batches(self.log, **self.time.options)

    def next_batch(self) -> Batch:
        self.publisher.protocol.enter(Phase.GET_BATCH)
        batch = self.batches.next(lambda: self.publisher.projected)
        self.publisher.engines(metrics.Clock())
        self.publisher.protocol.enter(Phase.TRAIN)
        return batch

    def submit(self, batch: Batch) -> None:
        self.publisher.wait()
        snapshot = self.snapshots.take(batch.version, self.model)
        dropped = [*batch.dropped, *self.batches.late(batch)]
        figures = {"tokens": 1.0, "reward": 0.0, "lag_mean": 0.0}
        self.publisher.submit(Version(snapshot, self.model, batch, dropped, figures, metrics.Clock()))

    def jobs(self) -> None:
        """Until the publisher has done all that it was asked for; the trainer does not know yet."""
        for job in self.publisher._pending:
            job.result(30)

    def heads(self) -> list[int]:
        return [step.version for step in self.run.steps()]


@pytest.fixture
def stage(s3: S3Endpoint, base: Path, tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make(groups: int = 12, options: dict[str, Any] | None = None, **changes: Any) -> Stage:
        run = Scene(s3, base, tmp_path, **({"staleness": {"alpha": 4, "mode": "six_steps"}} | changes))
        made.append(Stage(run, base, groups, **options or {}))
        return made[-1]

    yield make
    for one in made:
        one.gate.open.set()
        one.publisher.close()
        one.run.close()


def test_the_next_batch_is_trained_while_a_version_is_on_its_way(stage: Callable[..., Stage]) -> None:
    on = stage()
    first = on.next_batch()
    on.submit(first)
    second = on.next_batch()
    assert (second.base, second.version) == (1, 2)
    assert [str(uid) for uid in second.uids] == ["3.0", "4.0", "5.0"], "nothing of version 1 is offered again"
    assert on.gate.reached.wait(10) and on.heads() == [0], "its record does not stand yet"
    assert on.control.named("update") == [("update", 0, 0)]
    with pytest.raises(ProtocolViolation):
        on.publisher.protocol.enter(Phase.GET_BATCH)
    on.gate.open.set()
    on.submit(second)
    assert on.control.named("prefetch", "update") == [("update", 0, 0), ("prefetch", 1, 1), ("update", 1, 1)]
    on.publisher.wait()
    assert [s.trained for s in on.run.steps()] == [(), ("0.0", "1.0", "2.0"), ("3.0", "4.0", "5.0")]
    assert on.control.named("update")[-1][1] == 1, "the last version reaches the engines with the next batch"
    assert on.run.steps()[1].weights_sha256 == hash_of(on.model)


def test_the_projection_is_what_the_log_says_afterwards(stage: Callable[..., Stage]) -> None:
    """But for the place of the state, which is only known then."""
    on = stage(options={"version": 0})
    on.submit(on.next_batch())
    projected = on.publisher.projected
    assert projected is not None
    on.gate.open.set()
    on.publisher.wait()
    assert on.publisher.projected is None

    def view(ledger: Ledger) -> dict[str, Any]:
        return ledger.snapshot().model_dump(exclude={"states"}) | {"lsn": ledger.lsn, "states": set(ledger.states)}

    assert view(projected) == view(on.log.sync())


def test_what_is_dropped_without_a_batch_waits_for_the_record(stage: Callable[..., Stage]) -> None:
    on = stage(groups=3)
    on.submit(on.next_batch())
    on.run.seal([make_group(i, 4, rewards=lambda k, draw: 1.0) for i in range(3, 6)])
    before = on.log.ledger.lsn

    def commit() -> None:
        assert on.run.log().ledger.lsn == before, "nothing is written beside the publisher"
        on.gate.open.set()
        on.jobs()

    on.time.events = [lambda: None, lambda: None, commit, lambda: on.run.seal_many(9)]
    on.publisher.protocol.enter(Phase.GET_BATCH)
    batch = on.batches.next(lambda: on.publisher.projected)
    assert [str(uid) for uid in batch.uids] == ["6.0", "7.0", "8.0"] and batch.base == 1
    settled = [record for record in on.run.log().records() if isinstance(record, Settle)]
    assert [(d.uid, d.reason) for d in settled[0].dropped] == [(f"{i}.0", Reason.EQUAL_REWARD) for i in (3, 4, 5)]
    assert on.batches.report().flat == [1.0] * 12, "looked at once"


@pytest.mark.parametrize("failure", [StoreUnavailable("no answer"), OSError("disk full")])
def test_a_push_that_fails_ends_the_trainer_before_any_later_commit(
    stage: Callable[..., Stage], failure: Exception
) -> None:
    on = stage()
    on.submit(on.next_batch())
    on.gate.failure = failure
    second = on.next_batch()
    on.gate.open.set()
    with pytest.raises(type(failure)):
        on.submit(second)
    with pytest.raises(type(failure)):
        _ = on.publisher.projected
    assert on.heads() == [0] and on.control.named("update") == [("update", 0, 0)]


def test_a_fenced_publisher_commits_nothing_and_tells_the_waiting_trainer(stage: Callable[..., Stage]) -> None:
    on = stage(groups=3)
    on.submit(on.next_batch())
    assert on.gate.reached.wait(10)
    on.run.log().fence()
    on.time.events = [on.gate.open.set, lambda: on.publisher._pending[-1].exception(30)]
    on.publisher.protocol.enter(Phase.GET_BATCH)
    with pytest.raises(Fenced):
        on.batches.next(lambda: on.publisher.projected)
    with pytest.raises(Fenced):
        on.publisher.wait()
    assert on.heads() == [0]


def test_a_fence_at_the_engines_ends_it_too(stage: Callable[..., Stage]) -> None:
    on = stage()
    first = on.next_batch()
    on.gate.open.set()
    on.submit(first)
    second = on.next_batch()
    on.publisher.wait()
    on.run.log().fence()
    with pytest.raises(Fenced):
        on.submit(second)
    assert on.heads() == [0, 1]


def test_a_version_that_hangs_is_told_by_the_deadline(stage: Callable[..., Stage]) -> None:
    on = stage(deadlines={"publish": 0.2})
    batch = on.next_batch()
    on.jobs()
    on.submit(batch)
    with pytest.raises(PublishTimeout, match=r"version \d was not published within deadlines.publish \(0.2 s\)"):
        on.publisher.wait()


def test_a_rollout_that_is_gone_is_told_while_a_version_is_on_its_way(stage: Callable[..., Stage]) -> None:
    on = stage(groups=3, deadlines={"batch": 10})
    on.submit(on.next_batch())
    with pytest.raises(BatchTimeout):
        on.next_batch()


def test_a_closed_publisher_commits_nothing_any_more(stage: Callable[..., Stage]) -> None:
    on = stage()
    on.submit(on.next_batch())
    assert on.gate.reached.wait(10)
    on.engines.stop = on.gate.open.set  # type: ignore[method-assign]
    on.publisher.close()
    assert not on.publisher._thread.is_alive() and on.heads() == [0]


def test_under_alpha_zero_all_is_in_line(stage: Callable[..., Stage]) -> None:
    on = stage(staleness={"alpha": 0})
    on.gate.open.set()
    on.publisher.engines(metrics.Clock())
    assert on.control.named("update") == [("update", 0, 0)]
    on.publisher.protocol.enter(Phase.GET_BATCH)
    batch = on.batches.next(lambda: on.publisher.projected)
    on.publisher.protocol.enter(Phase.TRAIN)
    on.submit(batch)
    assert on.heads() == [0, 1] and on.publisher.projected is None
    assert on.control.named("prefetch") == []
