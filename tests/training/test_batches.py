"""Waiting for a batch, on a real log and buffer."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.services.endpoints import S3Endpoint
from infra.store.log import CommitLog
from infra.training.batches import BatchTimeout, NoSignal
from rl.errors import Fenced, StalenessViolation
from rl.records import Outcome, Reason, Settle
from rl.trajectory import Group, Uid
from tests.training.scene import Scene
from tests.training.small import make_group

pytestmark = pytest.mark.server


@pytest.fixture
def scene(s3: S3Endpoint, base: Path, tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(**changes: Any) -> Scene:
        made.append(Scene(s3, base, tmp_path, **changes))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Time:
    """A clock that only pauses move; `events` happen at its pauses."""

    def __init__(self, *events: Callable[[], Any]) -> None:
        self.now, self.events = 0.0, list(events)

    def pause(self, seconds: float) -> None:
        self.now += seconds
        if self.events:
            self.events.pop(0)()

    @property
    def options(self) -> dict[str, Any]:
        return {"clock": lambda: self.now, "pause": self.pause}


def test_batch_is_formed_oldest_first_when_there_is_enough(scene: Callable[..., Scene]) -> None:
    run = scene()
    log = run.log()
    log.fence()
    run.commit(log)
    time = Time(lambda: run.seal_many(2), lambda: run.seal([make_group(2, 4), make_group(3, 4)]))
    batch = run.batches(log, **time.options).next()
    assert batch.uids == [Uid(0, 0), Uid(1, 0), Uid(2, 0)]
    assert (batch.base, batch.version, batch.lags, batch.dropped) == (0, 1, [0, 0, 0], [])
    assert [g.uid for g in batch.groups] == batch.uids and not time.events
    assert run.commit(log, batch).trained == ("0.0", "1.0", "2.0")


def test_timeout_counts_from_the_last_arrival_and_says_what_was_there(scene: Callable[..., Scene]) -> None:
    run = scene(deadlines={"batch": 10})
    log = run.log()
    log.fence()
    run.commit(log)
    time = Time(*[lambda: None] * 10, lambda: run.seal_many(1))
    with pytest.raises(
        BatchTimeout,
        match=r"no new group for 10 s .* batch of 3 at version 0: .* 1 groups \(1 of version 0\), 1 with signal",
    ):
        run.batches(log, **time.options).next()
    assert 12 < time.now < 20


def test_who_may_not_start_anything_is_not_late(scene: Callable[..., Scene]) -> None:
    run = scene(deadlines={"batch": 10})
    log = run.log()
    log.fence()
    run.commit(log)
    time = Time()
    options = time.options | {"pause": lambda seconds: (time.pause(seconds), time.now < 100)[1]}
    with pytest.raises(BatchTimeout, match="no new group for 10 s"):
        run.batches(log, **options).next()
    assert 108 < time.now < 120


def test_an_all_equal_group_is_never_trained(scene: Callable[..., Scene]) -> None:
    run = scene()
    log = run.log()
    log.fence()
    run.commit(log)
    run.seal([make_group(0, 4, rewards=lambda k, _: 1.0), *(make_group(i, 4) for i in (1, 2))])
    batch = run.batches(log).next()
    assert batch.uids == [Uid(1, 0), Uid(2, 0)]
    assert [(d.uid, d.reason, d.outcome) for d in batch.dropped] == [("0.0", "equal_reward", "abandon")]


def test_a_batch_without_any_signal_is_settled_and_waited_on(scene: Callable[..., Scene]) -> None:
    run = scene()
    log = run.log()
    log.fence()
    run.commit(log)
    run.seal_many(3, rewards=lambda k, _: 0.0)
    time = Time(lambda: run.seal([make_group(i, 4) for i in (3, 4, 5)]))
    batches = run.batches(log, **time.options)
    assert batches.next().uids == [Uid(3, 0), Uid(4, 0), Uid(5, 0)]
    assert batches.report().settled == {"equal_reward": 3}
    assert log.ledger.low_water == 3


def test_nothing_but_equal_rewards_ends_the_run_by_name(scene: Callable[..., Scene]) -> None:
    run = scene(training={"max_flat_groups": 6})
    log = run.log()
    log.fence()
    run.commit(log)
    run.seal_many(3, rewards=lambda k, _: 1.0)
    time = Time(lambda: run.seal([make_group(i, 4, rewards=lambda *_: 1.0) for i in (3, 4, 5)]))
    with pytest.raises(NoSignal, match="6 groups in a row"):
        run.batches(log, **time.options).next()


def test_tombstones_are_settled_at_once(scene: Callable[..., Scene]) -> None:
    run = scene()
    log = run.log()
    log.fence()
    run.commit(log)
    first = make_group(0, 4)
    run.seal([Group.give_up(first.uid, first.problem, 0, "environment_error")])
    time = Time(lambda: run.seal([make_group(0, 4, attempt=1), make_group(1, 4), make_group(2, 4)]))
    batch = run.batches(log, **time.options).next()
    assert batch.uids == [Uid(0, 1), Uid(1, 0), Uid(2, 0)]
    assert [r.dropped[0].reason for r in log.records() if isinstance(r, Settle)] == ["environment_error"]


def test_what_the_step_makes_too_old_is_dropped_with_it(scene: Callable[..., Scene]) -> None:
    run = scene(staleness={"alpha": 0})
    log = run.log()
    log.fence()
    run.commit(log)
    run.seal_many(5)
    batches = run.batches(log)
    batch = batches.next()
    assert [d.uid for d in batches.late(batch)] == ["3.0", "4.0"]


def test_a_member_older_than_its_group_claims_raises(scene: Callable[..., Scene]) -> None:
    """Selection goes by the group; the check goes by each member."""
    run = scene(staleness={"alpha": 0})
    log = run.log()
    log.fence()
    for _ in range(2):
        run.commit(log)
    groups = [make_group(i, 4, version=1) for i in range(3)]
    groups[1].members[2] = dataclasses.replace(groups[1].members[2], start_version=0)
    run.seal(groups)
    with pytest.raises(StalenessViolation, match=r"1\.0/2 of version 0 has lag 1 at version 1, alpha is 0"):
        run.batches(log).next()


def test_a_newer_fence_ends_the_wait(scene: Callable[..., Scene]) -> None:
    run = scene()
    log = run.log()
    log.fence()
    run.commit(log)
    time = Time(lambda: run.log("other").fence())
    with pytest.raises(Fenced):
        run.batches(log, **time.options).next()


def protect(run: Scene, log: CommitLog, ordinal: int) -> Uid:
    """Let the attempts of a problem grow too old until it is protected; the attempt then open."""
    for attempt in range(run.config.rollout.stale_attempts):
        problem = make_group(ordinal, 4, attempt=attempt).problem
        run.seal([Group.give_up(Uid(ordinal, attempt), problem, 0, "stale")])
        log.append_settle([run.config.drops.drop(log.sync(), Uid(ordinal, attempt), Reason.STALE)])
    return Uid(ordinal, run.config.rollout.stale_attempts)


def test_a_version_is_held_for_a_problem_that_grew_too_old_too_often(scene: Callable[..., Scene]) -> None:
    run = scene()
    log = run.log()
    log.fence()
    run.commit(log)
    uid = protect(run, log, 9)
    run.seal_many(3)
    time = Time(*[lambda: None] * 20, lambda: run.seal([make_group(9, 4, attempt=uid.attempt)]))
    batch = run.batches(log, **time.options).next()
    assert not time.events, "the batch was there and waited for it"
    assert batch.uids == [uid, Uid(0, 0), Uid(1, 0)]


def test_a_version_is_held_no_longer_than_a_trajectory_may_take(scene: Callable[..., Scene]) -> None:
    run = scene(deadlines={"trajectory": 5, "batch": 60})
    log = run.log()
    log.fence()
    run.commit(log)
    uid = protect(run, log, 9)
    run.seal_many(3)
    time = Time()
    batches = run.batches(log, **time.options)
    assert batches.next().uids == [Uid(0, 0), Uid(1, 0), Uid(2, 0)]
    assert 5 < time.now < 6
    (settle,) = [r for r in log.records() if isinstance(r, Settle) and r.dropped[0].reason is Reason.TOO_LONG]
    assert (settle.dropped[0].uid, settle.dropped[0].outcome) == (str(uid), Outcome.ABANDON)
    assert batches.report().evicted == {("lake", 0): 1}


def test_evicted_groups_are_counted_by_domain_and_length(scene: Callable[..., Scene]) -> None:
    run = scene(staleness={"alpha": 0})
    log = run.log()
    log.fence()
    run.commit(log)
    groups = [make_group(i, 4) for i in range(5)]
    run.seal(groups)
    batches = run.batches(log)
    batches.late(batches.next())
    lengths = [max(m.generated_tokens for m in group.members) for group in groups[3:]]
    expected = Counter(("lake", 2 ** math.ceil(math.log2(n))) for n in lengths)
    assert batches.report().evicted == expected
    assert not batches.report().evicted, "reported once"
