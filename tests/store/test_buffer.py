"""The sample buffer: what is seen, forgotten and read, and how often."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.store import schema
from infra.store.buffer import SampleBuffer
from infra.store.errors import Corrupt, SegmentTaken
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.records import Drop, Outcome, Reason
from rl.selection import DropPolicy, select
from rl.staleness import StalenessPolicy
from rl.trajectory import Uid
from tests.store.conftest import Tap
from tests.store.samples import commit, group, tombstone, untold

POLICY = StalenessPolicy(alpha=1, groups_per_step=2, examined_per_step=2)


@pytest.fixture
def log(store: ObjectStore, prefix: str) -> CommitLog:
    made = CommitLog(store, prefix, "trainer-1")
    made.fence()
    commit(made)
    return made


@pytest.fixture
def producer(store: ObjectStore, prefix: str) -> SampleBuffer:
    return SampleBuffer(store, prefix)


@pytest.fixture
def consumer(tapped: ObjectStore, prefix: str) -> SampleBuffer:
    return SampleBuffer(tapped, prefix)


def offered(buffer: SampleBuffer, log: CommitLog) -> list[Uid]:
    return [candidate.uid for candidate in buffer.refresh(log.ledger, POLICY)]


def test_sealed_groups_are_offered_taken_and_forgotten(
    producer: SampleBuffer, consumer: SampleBuffer, log: CommitLog, tap: Tap
) -> None:
    groups = [group(0), group(1, rewards=(1.0, 1.0)), tombstone(2)]
    key = producer.seal(groups[:2], "w1", 0).key
    assert key == "groups/0000000000/w1-000000.parquet"
    producer.seal(groups[2:], "w1", 1)
    found = consumer.refresh(log.ledger, POLICY)
    assert [(c.uid, c.version, c.informative, c.tombstone) for c in found] == [
        (Uid(0, 0), 0, True, None),
        (Uid(1, 0), 0, False, None),
        (Uid(2, 0), 0, False, "reward_error"),
    ]
    assert consumer.take([Uid(1, 0), Uid(0, 0)]) == [untold(groups[1]), untold(groups[0])]
    assert consumer.segments([Uid(1, 0), Uid(0, 0)]) == [key, key]
    assert consumer.refresh(log.ledger, POLICY) == found, "taking consumes nothing: the log does"
    assert consumer.pending_bytes > 0
    commit(log, [Uid(0, 0)], [key])
    assert offered(consumer, log) == [Uid(1, 0), Uid(2, 0)]
    commit(log, [Uid(1, 0)], [key], dropped=[Drop(uid="2.0", reason=Reason.REWARD_ERROR, outcome=Outcome.RETRY)])
    assert offered(consumer, log) == []
    assert consumer.pending_bytes == 0
    assert tap.count("get_object", "groups/") == 2, "each object is read once"


def test_a_whole_step_through_selection_and_its_replay(
    producer: SampleBuffer, consumer: SampleBuffer, log: CommitLog, store: ObjectStore, prefix: str
) -> None:
    for n in range(3):
        producer.seal([group(n)], "w1", n)
    picked = select(log.ledger, consumer.refresh(log.ledger, POLICY), POLICY, DropPolicy())
    uids = [c.uid for c in picked.batch]
    batch = consumer.take(uids)
    step = commit(log, uids, consumer.segments(uids), dropped=picked.dropped)
    reborn = CommitLog(store, prefix, "trainer-2")
    reborn.fence()
    assert reborn.steps_after(0) == [step]
    assert SampleBuffer(store, prefix).fetch(step) == batch


def test_sealing_again_is_harmless_and_the_first_stands(
    producer: SampleBuffer, consumer: SampleBuffer, log: CommitLog
) -> None:
    first, rerun = group(0, rewards=(0.0, 1.0)), group(0, rewards=(0.5, 0.0))
    keys = {producer.seal([g], "w1", 0).key for g in (first, first, rerun)}
    assert len(keys) == 1
    assert offered(consumer, log) == [Uid(0, 0)]
    assert consumer.take([Uid(0, 0)]) == [untold(first)]


def test_a_name_used_for_other_groups_is_refused(producer: SampleBuffer) -> None:
    producer.seal([group(0)], "w1", 0)
    with pytest.raises(SegmentTaken, match=r"already holds 0\.0"):
        producer.seal([group(1)], "w1", 0)


def test_a_segment_has_one_version_and_a_plain_writer(producer: SampleBuffer) -> None:
    with pytest.raises(ValueError, match="one version"):
        producer.seal([group(0, version=0), group(1, version=1)], "w1", 0)
    with pytest.raises(ValueError, match="plain name"):
        producer.seal([group(0)], "../w1", 0)


def test_old_versions_are_neither_listed_nor_read(
    producer: SampleBuffer, consumer: SampleBuffer, log: CommitLog, tap: Tap, prefix: str
) -> None:
    for version in range(6):
        if version:
            commit(log)
        producer.seal([group(version, version=version)], "w1", version)
    assert offered(consumer, log) == [Uid(4, 0), Uid(5, 0)]
    assert tap.calls[0] == ("list_objects_v2", f"{prefix}groups/0000000004/")
    assert sorted(key for name, key in tap.calls if name == "get_object") == [
        f"{prefix}groups/{v:010d}/w1-{v:06d}.parquet" for v in (4, 5)
    ]
    assert tap.count("list_objects_v2") == 1


@pytest.mark.slow
def test_a_refresh_costs_the_same_however_long_the_history_is(
    producer: SampleBuffer, log: CommitLog, tapped: ObjectStore, tap: Tap, store: ObjectStore, prefix: str
) -> None:
    """1,200 settled segments: more than a listing page holds."""
    for _ in range(12):
        commit(log)
    body = schema.encode([group(0)])
    old = [f"{prefix}groups/{n // 120:010d}/old-{n:06d}.parquet" for n in range(1200)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda key: store.put(key, body), old))
    for n in range(3):
        producer.seal([group(n, version=12)], "w1", n)
    reader = SampleBuffer(tapped, prefix)
    assert offered(reader, log) == [Uid(n, 0) for n in range(3)]
    assert Counter(name for name, _ in tap.calls) == {"list_objects_v2": 1, "get_object": 3}
    tap.calls.clear()
    producer.seal([group(3, version=12)], "w1", 3)
    assert offered(reader, log) == [Uid(n, 0) for n in range(4)]
    assert Counter(name for name, _ in tap.calls) == {"list_objects_v2": 1, "get_object": 1}


def test_what_grows_too_old_is_forgotten_so_that_it_can_be_drawn_again(
    producer: SampleBuffer, consumer: SampleBuffer, log: CommitLog
) -> None:
    producer.seal([group(0, version=0)], "w1", 0)
    assert offered(consumer, log) == [Uid(0, 0)]
    commit(log)
    assert offered(consumer, log) == [Uid(0, 0)]
    commit(log)
    assert offered(consumer, log) == [] and consumer.pending_bytes == 0
    producer.seal([group(0, version=2)], "w2", 0)
    assert [(c.uid, c.version) for c in consumer.refresh(log.ledger, POLICY)] == [(Uid(0, 0), 2)]


def test_of_two_copies_the_offered_one_is_trained_and_replayed(
    producer: SampleBuffer, consumer: SampleBuffer, log: CommitLog
) -> None:
    late, early = group(0, rewards=(0.0, 1.0)), group(0, rewards=(0.25, 0.75))
    producer.seal([late], "w2", 0)
    assert offered(consumer, log) == [Uid(0, 0)]
    assert consumer.take([Uid(0, 0)]) == [untold(late)]
    producer.seal([early], "w1", 0)  # sorts first, but came after the batch was taken
    assert offered(consumer, log) == [Uid(0, 0)]
    step = commit(log, [Uid(0, 0)], consumer.segments([Uid(0, 0)]))
    assert consumer.fetch(step) == [untold(late)]
    assert offered(consumer, log) == []


def test_all_readers_choose_the_same_copy_and_a_group_before_a_tombstone(
    producer: SampleBuffer, consumer: SampleBuffer, log: CommitLog
) -> None:
    producer.seal([tombstone(0)], "w1", 0)
    producer.seal([group(0)], "w3", 0)
    producer.seal([group(0, rewards=(2.0, 3.0))], "w2", 0)
    (found,) = consumer.refresh(log.ledger, POLICY)
    assert found.tombstone is None
    assert consumer.segments([Uid(0, 0)]) == ["groups/0000000000/w2-000000.parquet"]


def test_an_attempt_that_our_ledger_does_not_know_yet_is_kept(
    producer: SampleBuffer, consumer: SampleBuffer, log: CommitLog, store: ObjectStore, prefix: str
) -> None:
    behind = CommitLog(store, prefix, "reader")
    behind.sync()
    log.append_settle([Drop(uid="0.0", reason=Reason.STALE, outcome=Outcome.RETRY)])
    producer.seal([group(0, attempt=1)], "w1", 0)
    assert offered(consumer, behind) == []
    behind.sync()
    assert offered(consumer, behind) == [Uid(0, 1)]


def test_abandoned_versions_are_offered_to_be_dropped_by_name(
    producer: SampleBuffer, consumer: SampleBuffer, log: CommitLog
) -> None:
    commit(log)
    producer.seal([group(0, version=1)], "w1", 0)
    log.append_rollback(0)
    picked = select(log.ledger, consumer.refresh(log.ledger, POLICY), POLICY, DropPolicy())
    assert [(d.uid, d.reason) for d in picked.dropped] == [("0.0", Reason.ROLLED_BACK)]


def test_parallel_writers_lose_nothing(producer: SampleBuffer, consumer: SampleBuffer, log: CommitLog) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: producer.seal([group(n)], f"w{n % 4}", n), range(40)))
    assert offered(consumer, log) == [Uid(n, 0) for n in range(40)]
    some = [Uid(n, 0) for n in (39, 0, 17)]
    assert consumer.take(some) == [untold(group(n)) for n in (39, 0, 17)]


def test_what_is_no_segment_is_named_or_ignored(
    consumer: SampleBuffer, log: CommitLog, store: ObjectStore, prefix: str
) -> None:
    store.put(f"{prefix}groups/0000000000/notes.txt", b"hello")
    assert offered(consumer, log) == []
    store.put(f"{prefix}groups/0000000000/w1-000000.parquet", b"PAR1")
    with pytest.raises(Corrupt, match=r"w1-000000\.parquet: not a segment"):
        offered(consumer, log)


def test_a_segment_under_the_wrong_version_is_corrupt(
    producer: SampleBuffer, consumer: SampleBuffer, log: CommitLog, store: ObjectStore, prefix: str
) -> None:
    key = producer.seal([group(0, version=1)], "w1", 0).key
    store.put(f"{prefix}groups/0000000000/w1-000000.parquet", store.get(prefix + key))
    with pytest.raises(Corrupt, match="another version"):
        offered(consumer, log)


def test_a_segment_deleted_between_listing_and_reading_is_skipped(
    producer: SampleBuffer, consumer: SampleBuffer, log: CommitLog, tap: Tap, store: ObjectStore, prefix: str
) -> None:
    key = producer.seal([group(0)], "w1", 0).key
    tap.before["get_object"] = [lambda: store.delete([prefix + key])]
    assert offered(consumer, log) == []


def test_a_replay_without_its_segment_is_corruption(
    producer: SampleBuffer, consumer: SampleBuffer, log: CommitLog, store: ObjectStore, prefix: str
) -> None:
    key = producer.seal([group(0)], "w1", 0).key
    wrong = commit(log, [Uid(1, 0)], [key])
    with pytest.raises(Corrupt, match=r"1\.0 in groups/.*no such group"):
        consumer.fetch(wrong)
    step = commit(log, [Uid(0, 0)], [key])
    store.delete([prefix + key])
    with pytest.raises(Corrupt, match="missing, though a step record names it"):
        consumer.fetch(step)
