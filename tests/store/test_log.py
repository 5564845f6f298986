"""The commit log: folding, hints, commits, fences, zombies, lost acknowledgements."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from botocore.exceptions import ReadTimeoutError

from infra.store.errors import Overtaken, StoreUnavailable
from infra.store.log import SNAPSHOT_EVERY, CommitLog
from infra.store.objects import ObjectStore
from rl.errors import DeadlineExceeded, Fenced, LogCorrupt, ProtocolViolation
from rl.ledger import LINE
from rl.records import Drop, Fence, Outcome, Reason, Step
from rl.trajectory import Uid
from tests.store.conftest import Tap
from tests.store.samples import commit, same, step_fields

LOST = ReadTimeoutError(endpoint_url="http://store")


def drop(ordinal: int, attempt: int = 0) -> Drop:
    return Drop(uid=f"{ordinal}.{attempt}", reason=Reason.STALE, outcome=Outcome.RETRY)


@pytest.fixture
def trainer(store: ObjectStore, prefix: str) -> CommitLog:
    """A trainer that has fenced and committed version 0."""
    log = CommitLog(store, prefix, "trainer-1")
    log.fence()
    commit(log)
    return log


def reader(store: ObjectStore, prefix: str, name: str = "reader") -> CommitLog:
    log = CommitLog(store, prefix, name)
    log.sync()
    return log


def test_readers_fold_what_was_written(store: ObjectStore, prefix: str, trainer: CommitLog) -> None:
    follower = reader(store, prefix)
    commit(trainer, [Uid(0, 0), Uid(1, 0)], dropped=[drop(2)])
    trainer.append_settle([drop(3)])
    commit(trainer, [Uid(2, 1)])
    assert same(follower.sync(), trainer.ledger)
    assert (follower.ledger.head, follower.ledger.low_water, follower.ledger.attempts) == (2, 3, {3: 1})
    assert [r.kind for r in follower.records()] == ["fence", "step", "step", "settle", "step"]
    assert [r.lsn for r in follower.records(4)] == [4, 5]


def test_any_version_is_found_whatever_was_written_between(store: ObjectStore, prefix: str, trainer: CommitLog) -> None:
    for n in range(5):
        commit(trainer, [Uid(n, 0)])
        for _ in range(n):
            trainer.fence()
    trainer.append_rollback(2)
    commit(trainer)
    trainer.append_settle([drop(9)])
    follower = reader(store, prefix)
    for version in range(7):
        found = follower.step(version)
        assert found is not None and found.version == version
    assert follower.step(7) is None and CommitLog(store, f"{prefix}none/", "r").step(0) is None


def test_an_empty_log_is_a_ledger_without_a_version(store: ObjectStore, prefix: str) -> None:
    assert reader(store, prefix).ledger.head is None


def test_snapshots_hold_after_the_record_that_carries_them(store: ObjectStore, prefix: str, trainer: CommitLog) -> None:
    for n in range(SNAPSHOT_EVERY + 2):
        commit(trainer, [Uid(n, 0)])
    records = list(trainer.records())
    carrying = [r.version if isinstance(r, Step) else r.kind for r in records if r.snapshot is not None]
    assert carrying == ["fence", 0, SNAPSHOT_EVERY]
    for record in records:
        if record.snapshot is not None:
            fold = CommitLog(store, prefix, "audit").ledger
            for earlier in records[: record.lsn]:
                fold.apply(earlier)
            assert fold.snapshot() == record.snapshot


def test_a_reader_starts_at_the_newest_snapshot(tapped: ObjectStore, tap: Tap, prefix: str, trainer: CommitLog) -> None:
    for n in range(SNAPSHOT_EVERY + 2):
        commit(trainer, [Uid(n, 0)])
    assert same(reader(tapped, prefix).ledger, trainer.ledger)
    # head.json, the record with the snapshot, two steps after it, and the one that is not there
    assert tap.count("get_object") == 5 and tap.count("list_objects_v2") == 0


@pytest.mark.parametrize(
    "hint",
    [
        None,
        b"",
        b"{}",
        b'{"lsn": 2}',
        b'{"lsn": 3}',
        b'{"lsn": 99}',
        b'{"lsn": -1}',
        b"\xff\xfe",
        b'{"lsn": "x"}',
    ],
)
def test_the_hint_may_be_stale_missing_or_nonsense(
    store: ObjectStore, prefix: str, trainer: CommitLog, hint: bytes | None
) -> None:
    for n in range(SNAPSHOT_EVERY + 1):
        commit(trainer, [Uid(n, 0)])
    if hint is None:
        store.delete([prefix + "head.json"])
    else:
        store.put(prefix + "head.json", hint)
    assert same(reader(store, prefix).ledger, trainer.ledger)


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 6, 7, 40])
def test_without_the_hint_the_newest_record_is_found_by_few_requests(
    tapped: ObjectStore, tap: Tap, store: ObjectStore, prefix: str, steps: int
) -> None:
    log = CommitLog(store, prefix, "trainer-1")
    for n in range(steps):
        if n == 0:
            log.fence()
            commit(log)
        else:
            commit(log, [Uid(n, 0)])
    store.delete([prefix + "head.json"])
    assert same(reader(tapped, prefix).ledger, log.ledger)
    assert tap.count("head_object") <= 2 * max(1, log.ledger.lsn).bit_length() + 1
    assert tap.count("get_object") <= SNAPSHOT_EVERY + 3


def test_a_commit_stands_when_the_hint_can_not_be_written(tap: Tap, store: ObjectStore, prefix: str) -> None:
    log = CommitLog(ObjectStore(tap, store.bucket, deadline_s=0.1), prefix, "trainer-1")
    log.fence()
    tap.before["put_object"] = [lambda: None, *[LOST] * 50]
    assert commit(log).version == 0
    assert same(reader(store, prefix).ledger, log.ledger)


def test_a_zombie_is_fenced_by_the_store(store: ObjectStore, prefix: str, trainer: CommitLog) -> None:
    successor = CommitLog(store, prefix, "trainer-2")
    fence = successor.fence()
    with pytest.raises(Fenced, match="trainer-2"):
        commit(trainer, [Uid(0, 0)])
    with pytest.raises(Fenced):
        trainer.append_settle([drop(0)])
    step = commit(successor, [Uid(0, 0)])
    assert (step.lsn, step.version, successor.ledger.fence) == (fence + 1, 1, fence)
    with pytest.raises(Fenced):
        commit(trainer, [Uid(0, 0)])


def test_a_zombie_that_has_read_the_new_fence_does_not_walk_past_it(
    store: ObjectStore, prefix: str, trainer: CommitLog
) -> None:
    CommitLog(store, prefix, "trainer-2").fence()
    for _ in range(2):
        with pytest.raises(Fenced, match="newer than ours"):
            trainer.sync()
    with pytest.raises(Fenced):
        commit(trainer, [Uid(0, 0)])
    with pytest.raises(Fenced):
        trainer.append_settle([drop(0)])
    with pytest.raises(Fenced):
        trainer.append_rollback(0)
    assert [r.writer for r in reader(store, prefix).records()] == ["trainer-1", "trainer-1", "trainer-2"]


def test_of_racing_fences_the_last_holds(store: ObjectStore, prefix: str) -> None:
    logs = [CommitLog(store, prefix, f"trainer-{n}") for n in range(6)]
    with ThreadPoolExecutor(6) as pool:
        fences = list(pool.map(CommitLog.fence, logs))
    assert sorted(fences) == [1, 2, 3, 4, 5, 6]
    records = {record.lsn: record for record in reader(store, prefix).records()}
    for log, fence in zip(logs, fences, strict=True):
        assert isinstance(records[fence], Fence) and records[fence].writer == log.writer
        if fence == 6:
            assert commit(log).version == 0
        else:
            with pytest.raises(Fenced):
                commit(log)


def test_steps_need_a_fence(store: ObjectStore, prefix: str, trainer: CommitLog) -> None:
    stranger = reader(store, prefix, "stranger")
    with pytest.raises(ProtocolViolation, match="fence"):
        commit(stranger)
    with pytest.raises(ProtocolViolation, match="fence"):
        stranger.append_rollback(0)


@pytest.mark.parametrize("times", [1, 3])
def test_a_lost_acknowledgement_is_a_commit(tap: Tap, tapped: ObjectStore, prefix: str, times: int) -> None:
    log = CommitLog(tapped, prefix, "trainer-1")
    log.fence()
    tap.after["put_object"] = [LOST] * times
    assert commit(log).lsn == 2
    commit(log, [Uid(0, 0)])
    assert [r.lsn for r in log.records()] == [1, 2, 3]
    assert same(reader(tapped, prefix).ledger, log.ledger)


def test_a_lost_acknowledgement_and_a_successor_is_a_commit_and_then_a_fence(
    tap: Tap, tapped: ObjectStore, store: ObjectStore, prefix: str
) -> None:
    log = CommitLog(tapped, prefix, "trainer-1")
    log.fence()
    commit(log)
    tap.after["put_object"] = [LOST]
    tap.before["put_object"] = [
        lambda: None,
        lambda: (CommitLog(store, prefix, "trainer-2").fence(), None)[1],
    ]
    assert commit(log, [Uid(0, 0)]).version == 1
    with pytest.raises(Fenced):
        commit(log, [Uid(1, 0)])


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("kind", ["step", "rollback"])
def test_after_an_unknown_outcome_only_a_new_fence_goes_on(
    tap: Tap, store: ObjectStore, prefix: str, kind: str, arrives: bool
) -> None:
    log = CommitLog(ObjectStore(tap, store.bucket, deadline_s=0.2), prefix, "trainer-1")
    log.fence()
    commit(log)
    tap.before["put_object"] = [LOST] * 50
    if arrives:  # but neither the answer nor the repetitions do
        tap.after["put_object"] = [LOST]
        tap.before["put_object"][:1] = [lambda: None]
    with pytest.raises(StoreUnavailable):
        commit(log, [Uid(0, 0)]) if kind == "step" else log.append_rollback(0)
    tap.before.clear()
    for go_on in (log.sync, lambda: commit(log, [Uid(0, 0)]), lambda: log.append_rollback(0)):
        with pytest.raises(Fenced, match="record 3 of ours"):
            go_on()
    log.fence()
    uid = next(iter(log.ledger.outstanding()))
    assert commit(log, [uid]).base == (1 if arrives and kind == "step" else 0)
    assert reader(store, prefix).ledger.trained_groups == (2 if arrives and kind == "step" else 1)


def test_an_operators_settle_is_folded_and_the_step_follows(
    store: ObjectStore, prefix: str, trainer: CommitLog
) -> None:
    reader(store, prefix, "operator").append_settle([drop(5)])
    reader(store, prefix, "operator").append_gc_floor(0)
    step = commit(trainer, [Uid(0, 0)])
    assert (step.lsn, step.version) == (5, 1)
    assert same(reader(store, prefix).ledger, trainer.ledger)


def test_a_step_that_an_operator_made_invalid_is_not_written(
    store: ObjectStore, prefix: str, trainer: CommitLog
) -> None:
    reader(store, prefix, "operator").append_settle([drop(0)])
    with pytest.raises(Overtaken, match="operator came first"):
        commit(trainer, [Uid(0, 0)])
    assert commit(trainer, [Uid(0, 1)]).version == 1
    assert same(reader(store, prefix).ledger, trainer.ledger)


def test_what_was_decided_on_an_empty_log_is_overtaken_too(store: ObjectStore, prefix: str) -> None:
    operator = reader(store, prefix, "operator")
    log = CommitLog(store, prefix, "trainer-1")
    log.fence()
    commit(log, [Uid(0, 0)])
    with pytest.raises(Overtaken, match="trainer-1 came first"):
        operator.append_settle([drop(0)])


def test_an_operator_loses_to_a_step_and_follows(store: ObjectStore, prefix: str, trainer: CommitLog) -> None:
    operator = reader(store, prefix, "operator")
    commit(trainer, [Uid(0, 0)])
    assert operator.append_settle([drop(1)]).lsn == 4
    assert same(trainer.sync(), operator.ledger)


def test_what_breaks_the_ledger_is_never_written(store: ObjectStore, prefix: str, trainer: CommitLog) -> None:
    commit(trainer, [Uid(0, 0)])
    with pytest.raises(LogCorrupt, match="not open"):
        commit(trainer, [Uid(0, 0)])
    with pytest.raises(ValueError, match="name one for each"):
        commit(trainer, [Uid(1, 0)], segments=[])
    assert commit(trainer, [Uid(1, 0)]).version == 2
    assert same(reader(store, prefix).ledger, trainer.ledger)


def test_metrics_that_are_no_numbers_can_be_read_back(store: ObjectStore, prefix: str, trainer: CommitLog) -> None:
    commit(trainer, metrics={"grad_norm": float("inf"), "kl": float("nan"), "reward": 0.1})
    *_, last = reader(store, prefix).records()
    assert isinstance(last, Step) and last.metrics["reward"] == 0.1


def test_replay_sees_the_live_steps_after_a_version(store: ObjectStore, prefix: str, trainer: CommitLog) -> None:
    commit(trainer, [Uid(0, 0)])
    commit(trainer, [Uid(1, 0)])
    trainer.append_settle([drop(7)])
    commit(trainer, [Uid(2, 0)])
    follower = reader(store, prefix)
    assert [s.version for s in follower.steps_after(0)] == [1, 2, 3]
    assert follower.steps_after(3) == []
    trainer.append_rollback(1)
    commit(trainer, [Uid(1, 1)])
    follower.sync()
    assert [(s.version, s.base, s.trained) for s in follower.steps_after(0)] == [
        (1, 0, ("0.0",)),
        (4, 1, ("1.1",)),
    ]
    with pytest.raises(LogCorrupt, match="version 9"):
        follower.steps_after(9)


def test_replay_sees_every_live_step_however_long_ago_the_version_was(
    store: ObjectStore, prefix: str, trainer: CommitLog
) -> None:
    """Also those that the ledger's line no longer has."""
    for _ in range(LINE + 6):
        commit(trainer)
    trainer.append_rollback(LINE + 2)
    commit(trainer)
    trainer.append_rollback(LINE + 1)
    commit(trainer)
    live = [*range(1, LINE + 2), LINE + 8]
    follower = reader(store, prefix)
    assert [s.version for s in follower.steps_after(0)] == live
    assert follower.ledger.line == live[-LINE:]


def test_a_rollback_is_folded_by_all(store: ObjectStore, prefix: str, trainer: CommitLog) -> None:
    follower = reader(store, prefix)
    commit(trainer, [Uid(0, 0)])
    follower.sync()
    trainer.append_rollback(0)
    assert same(follower.sync(), trainer.ledger)
    assert (follower.ledger.head, follower.ledger.next_version, follower.ledger.open_attempt(0)) == (0, 2, 1)
    assert same(reader(store, prefix).ledger, trainer.ledger), "its snapshot starts a fold"


def test_waiting_follows_the_log(store: ObjectStore, prefix: str, trainer: CommitLog) -> None:
    follower = CommitLog(store, prefix, "reader")
    with ThreadPoolExecutor(1) as pool:
        awaited = pool.submit(follower.wait_for, lambda ledger: ledger.next_version > 2, 30)
        commit(trainer)
        commit(trainer)
        assert awaited.result(timeout=30).head == 2
    with pytest.raises(DeadlineExceeded, match="version 99 was awaited"):
        follower.wait_for(lambda ledger: ledger.next_version > 99, 0.01, "version 99")


def test_the_records_of_an_unknown_format_are_refused_by_key(
    store: ObjectStore, prefix: str, trainer: CommitLog
) -> None:
    newest = trainer.read(2)
    assert newest is not None
    alien = json.loads(newest.model_dump_json()) | {"lsn": 3, "kind": "party"}
    store.put(f"{prefix}log/0000000003.json", json.dumps(alien).encode())
    with pytest.raises(LogCorrupt, match=r"log/0000000003\.json: not a record"):
        trainer.sync()
    store.put(f"{prefix}log/0000000003.json", newest.model_dump_json().encode())
    with pytest.raises(LogCorrupt, match="holds record 2"):
        trainer.sync()


def test_state_prefixes_are_fresh(trainer: CommitLog) -> None:
    first, second = trainer.state_prefix(), trainer.state_prefix()
    assert first != second and first.startswith("state/0000000003-") and first.endswith("/")
    assert commit(trainer, **step_fields(first)).state.prefix == first
