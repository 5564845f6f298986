"""Garbage collection against real servers: what is needed stays, what is not goes after the grace period, and neither a
crash nor a second collector changes what is left."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from infra.store.buffer import SampleBuffer
from infra.store.errors import NotFound
from infra.store.gc import Background, Collector
from infra.store.inventory import age_s, entries
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.records import GcFloor, Mark, StateRef
from rl.retention import Retention
from rl.staleness import StalenessPolicy
from tests.store.conftest import Tap
from tests.store.runs import Run
from tests.store.samples import group

HOUR = 3600.0
POLICY = StalenessPolicy(alpha=1, groups_per_step=1, examined_per_step=1)


@pytest.fixture
def run(store: ObjectStore, prefix: str, tmp_path: Path) -> Run:
    return Run(store, prefix, tmp_path)


def test_what_the_policy_lets_go_is_deleted_and_nothing_else(run: Run) -> None:
    run.steps(12)
    run.store.put(f"{run.prefix}config.json", b"{}")
    run.store.put(f"{run.prefix}base/manifest.json", b"{}")
    before = set(run.names())
    done = run.collector(newest=4).collect()
    assert done.floor == 8 and run.log.sync().gc_floor == 8
    assert run.states() == [8, 9, 10, 11] and run.segments() == [8, 9]
    gone = before - set(run.names())
    assert all(key.startswith(("state/", "groups/")) for key in gone)
    assert len(gone) == 8 * 3 + 9  # two files and a manifest each; a segment of each version, and two of version 0
    assert done.size > 0
    kept = set(run.names())
    again = run.collector(newest=4).collect()
    assert set(run.names()) == kept and not again.doomed and not again.segments
    assert not any(isinstance(r, GcFloor) for r in run.log.records(run.log.ledger.lsn + 1))


def test_a_survey_changes_nothing(run: Run) -> None:
    run.steps(6)
    before = run.names()
    found = run.collector(newest=2).survey()
    assert found.floor == 4 and found.in_force == 0 and not found.doomed and not found.segments
    assert run.names() == before


def test_the_grace_period_runs_from_the_record(run: Run) -> None:
    run.steps(6)
    done = run.collector(newest=2, grace_s=HOUR).collect()
    assert run.log.sync().gc_floor == 4 and done.in_force == 0
    assert run.states() == list(range(6)) and run.segments() == list(range(4)), "the floor is younger than an hour"
    run.collector(newest=2).collect()
    assert run.states() == [4, 5]


def test_the_ledger_of_a_grace_period_ago_is_told_by_the_servers_clock(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.steps(40)
    whole = run.log.sync()
    for old in (0, 1, 7, 30, whole.lsn):
        ages = {f"{run.prefix}log/{lsn:010d}.json": 100.0 if lsn <= old else 5.0 for lsn in range(1, whole.lsn + 1)}
        monkeypatch.setattr("infra.store.inventory.age_s", lambda _, key, ages=ages: ages[key])
        past = run.log.as_of(60.0)
        assert past.lsn == old and past.next_version == max(0, old - 1)


def test_pins_marks_and_every_nth(run: Run) -> None:
    run.steps(12)
    run.log.append_retain(2, Mark.PIN, run.log.ledger.states[2])
    run.log.append_retain(9, Mark.DELETE)
    run.collector(newest=3, every=4).collect()
    assert run.states() == [0, 2, 4, 8, 10, 11]
    assert run.loads(run.log.ledger.pins[2]) and run.sound()
    run.log.append_retain(2, Mark.UNPIN)
    run.collector(newest=3, every=4).collect()
    assert run.states() == [0, 4, 8, 10, 11]
    run.log.append_retain(4, Mark.DELETE)
    run.collector(newest=3, every=4).collect()
    assert run.states() == [0, 8, 10, 11], "an operator's word is above the policy, below the floor, too"


def test_a_pin_let_go_has_its_grace_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.steps(8)
    run.log.append_retain(1, Mark.PIN, run.log.ledger.states[1])
    run.collector(newest=2).collect()
    pinned = run.log.sync().lsn
    run.log.append_retain(1, Mark.UNPIN)
    monkeypatch.setattr("infra.store.inventory.age_s", lambda _, key: 100.0 if int(key[-15:-5]) <= pinned else 5.0)
    run.collector(newest=2, grace_s=60).collect()
    assert run.states() == [1, 6, 7]
    run.collector(newest=2).collect()
    assert run.states() == [6, 7]


def test_what_was_never_committed_goes_once_it_can_not_be_any_more(run: Run) -> None:
    run.steps(3)
    dead = run.log.state_prefix()
    run.state(99, dead)
    run.collector(newest=9).collect()
    assert any(key.startswith(dead) for key in run.names()), "the trainer may be about to commit it"
    run.log.append_settle([])  # another record takes its lsn: the step may still come
    run.collector(newest=9).collect()
    assert any(key.startswith(dead) for key in run.names())
    run.log.append_step(state=StateRef(prefix=dead, manifest_sha256="0" * 64, full=True), weights_sha256="w", alpha=1)
    run.collector(newest=9).collect()
    assert any(key.startswith(dead) for key in run.names()), "now it is a version"

    orphan = run.log.state_prefix()
    run.state(98, orphan)
    run.log.fence()
    run.collector(newest=9, grace_s=HOUR).collect()
    assert not any(key.startswith(orphan) for key in run.names())
    orphan = run.log.state_prefix()
    run.state(97, orphan)
    run.steps(1)
    run.collector(newest=9).collect()
    assert not any(key.startswith(orphan) for key in run.names())


def test_half_written_uploads_are_given_up_once_nobody_writes_them(run: Run) -> None:
    run.steps(2)
    client, bucket = run.store.client, run.store.bucket

    def begin(key: str) -> None:
        client.create_multipart_upload(Bucket=bucket, Key=run.prefix + key)

    def uploads() -> list[str]:
        found = client.list_multipart_uploads(Bucket=bucket, Prefix=run.prefix).get("Uploads", ())
        return sorted(u["Key"].removeprefix(run.prefix) for u in found if u["Key"].startswith(run.prefix))

    old, current = run.log.ledger.states[1].prefix + "big", run.log.state_prefix() + "big"
    for key in (old, current, "base/big"):
        begin(key)
    assert uploads() == sorted([old, current, "base/big"])
    run.collector(newest=9).collect()
    assert uploads() == [current], "the running trainer's own upload is left alone"


@pytest.mark.parametrize("alpha", [0, 1])
def test_a_run_with_sparse_checkpoints_resumes_after_a_collection(
    store: ObjectStore, prefix: str, tmp_path: Path, alpha: int
) -> None:
    run = Run(store, prefix, tmp_path, full_every=5, alpha=alpha)
    run.steps(14)
    run.collector(newest=1).collect()
    assert run.log.sync().gc_floor == 10 - alpha, "a replay from 10 reads samples that are alpha older"

    fresh = CommitLog(store, prefix, "next trainer")
    fresh.fence()
    ledger = fresh.ledger
    assert ledger.newest_full == 10 and run.loads(ledger.states[10])
    steps = fresh.steps_after(10)
    assert [step.version for step in steps] == [11, 12, 13]
    for step in steps:
        groups = SampleBuffer(store, prefix).fetch(step)
        assert [str(g.uid) for g in groups] == list(step.trained)


def test_a_rollback_after_a_collection_leaves_nothing_to_train_that_is_gone(run: Run) -> None:
    run.steps(8)
    run.collector(newest=3).collect()
    assert run.log.sync().gc_floor == 5
    run.buffer.seal([group(100, version=4)], "late", 0)  # a slow rollout, from below the floor
    run.log.append_rollback(5)
    offered = SampleBuffer(run.store, run.prefix).refresh(run.log.sync(), POLICY)
    assert all(candidate.version >= 5 for candidate in offered)
    run.steps(2)
    run.collector(newest=1).collect()
    assert run.states()[-1] == 9 and run.loads(run.log.sync().states[9])


def test_a_reader_that_lists_while_objects_go_sees_none_that_is_broken(run: Run, tapped: ObjectStore, tap: Tap) -> None:
    """Between the list and the reads of a reader with an old view, a whole collection happens."""
    run.steps(6)
    reader = CommitLog(run.store, run.prefix, "reader")
    old = reader.sync()
    for version in (4, 5):
        run.buffer.seal([group(50 + version, version=version)], "more", version)
    run.steps(6)
    run.buffer.seal([group(60, version=10)], "more", 10)
    tap.before["get_object"] = [lambda: run.collector(newest=1).collect() and None]
    offered = SampleBuffer(tapped, run.prefix).refresh(old, POLICY)
    assert all(candidate.version >= old.line[-2] for candidate in offered)
    assert run.segments() == [10], "what it had listed was deleted under its hands"
    assert SampleBuffer(run.store, run.prefix).refresh(reader.sync(), POLICY) is not None
    assert len(SampleBuffer(run.store, run.prefix).history(100)) == len(run.segments())


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.slow
def test_a_crash_at_any_operation_is_mended_by_the_next_collection(
    store: ObjectStore, prefix: str, tmp_path: Path
) -> None:
    def fresh(at: int) -> Run:
        run = Run(store, f"{prefix}{at}/", tmp_path / str(at))
        run.steps(7)
        run.log.append_retain(1, Mark.PIN, run.log.ledger.states[1])
        run.buffer.seal([group(50, version=5)], "more", 0)
        run.state(99, run.log.state_prefix())
        run.log.fence()
        return run

    def left(run: Run) -> tuple[list[int], list[int], int]:
        return run.states(), run.segments(), sum(key.startswith(("state/", "groups/")) for key in run.names())

    whole = fresh(0)
    tap = Tap(store.client)
    whole.collector(newest=2, store=ObjectStore(tap, store.bucket)).collect()
    wanted, operations = left(whole), len(tap.calls)
    assert wanted[:2] == ([1, 5, 6], [5])
    writes = [at for at, (name, _) in enumerate(tap.calls) if name.startswith(("put", "delete", "abort"))]
    assert len(writes) >= 4
    for at in [*writes, operations - 1]:
        for after in (False, True):
            run = fresh(2 * at + after + 1)
            cut = ObjectStore(_Cut(store.client, at, after), store.bucket)
            with pytest.raises(Killed):
                run.collector(newest=2, store=cut).collect()
            for state in run.log.sync().states.values():
                run.loads(state)  # whole or not there: never Corrupt
            run.collector(newest=2).collect()
            assert left(run) == wanted and run.sound(), f"killed {'after' if after else 'before'} operation {at}"


class _Cut:
    """A client whose process is killed before or after its n-th operation."""

    def __init__(self, client: object, at: int, after: bool) -> None:
        self._client, self._left, self._after = client, at, after

    def __getattr__(self, name: str) -> object:
        found = getattr(self._client, name)
        if not callable(found):
            return found

        def call(*args: object, **kwargs: object) -> object:
            self._left -= 1
            if self._left == -1 and not self._after:
                raise Killed
            answer = found(*args, **kwargs)
            if self._left == -1:
                raise Killed
            return answer

        return call


def test_two_collectors_at_once_do_no_harm(run: Run) -> None:
    run.steps(16)
    run.log.append_retain(3, Mark.PIN, run.log.ledger.states[3])
    failures: list[BaseException] = []

    def work(newest: int) -> None:
        try:
            run.collector(newest=newest).collect()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(newest,)) for newest in (2, 4, 4, 8)]
    for thread in threads:
        thread.start()
    run.steps(3)
    for thread in threads:
        thread.join(60)
    assert not failures
    run.collector(newest=4).collect()
    head = run.log.sync().head
    assert head == 18 and run.states()[-2:] == [17, 18] and 3 in run.states()
    assert run.sound()


def test_a_collector_with_an_old_view_deletes_nothing_new(run: Run, tapped: ObjectStore, tap: Tap) -> None:
    """It looked, and then everything changed before it deletes: a pin, a rollback, other collections."""
    run.steps(8)

    def meanwhile() -> None:
        run.log.sync()
        run.log.append_retain(6, Mark.PIN, run.log.ledger.states[6])
        run.log.append_rollback(6)
        run.steps(4)
        run.collector(newest=2).collect()

    tap.before["delete_objects"] = [meanwhile]
    run.collector(newest=3, store=tapped).collect()
    ledger = run.log.sync()
    assert ledger.head == 11
    assert all(run.loads(ledger.states[v]) for v in (10, 11)) and run.loads(ledger.pins[6]) and run.sound()


def test_collections_run_in_the_background_and_outlive_their_failures(run: Run, tapped: ObjectStore, tap: Tap) -> None:
    run.steps(6)
    made: list[int] = []

    def make() -> Collector:
        made.append(1)
        if len(made) == 1:
            raise NotFound("bucket", "gone")
        return run.collector(newest=2, store=tapped)

    background = Background(make, every=3)
    for version in range(3):
        background.after(version)
    assert not made, "not due yet"
    background.after(3)
    background.wait(30)
    assert len(made) == 1 and run.states() == list(range(6))
    background.after(5)
    background.wait(30)
    assert len(made) == 1, "the next one is due at version 6"
    background.after(7)
    background.wait(30)
    assert len(made) == 2 and run.states() == [4, 5]
    Background(make, every=None).after(100)
    assert len(made) == 2


def test_ages_are_told_by_the_server(store: ObjectStore, prefix: str) -> None:
    store.put(f"{prefix}a", b"abc")
    (found,) = entries(store, prefix)
    assert (found.key, found.size) == (f"{prefix}a", 3) and 0 <= found.age_s < 60
    assert 0 <= age_s(store, f"{prefix}a") < 60
    with pytest.raises(NotFound):
        age_s(store, f"{prefix}b")


def test_an_empty_run_has_nothing_to_collect(store: ObjectStore, prefix: str) -> None:
    done = Collector(CommitLog(store, prefix, "collector"), prefix, Retention(1), 0.0).collect()
    assert done.floor == 0 and not done.states and not done.doomed and not done.segments
