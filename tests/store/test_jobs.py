"""The job book: whoever writes, and how many at once, there is one order, and everybody folds the same."""

from __future__ import annotations

import math
import threading

import pytest

from infra.store.jobs import JobBook
from rl.config.load import validate_as
from rl.config.tenants import Job
from rl.errors import LogCorrupt
from rl.jobs import JobRefused, State
from tests.proxy.memory_store import MemoryStore


def job(name: str) -> Job:
    return validate_as(Job, {"tenant": "ann", "name": name, "domains": ["lake"]}, "job")


def book(store: MemoryStore) -> JobBook:
    return JobBook(store, "shop", clock=lambda: 7.0)  # type: ignore[arg-type]


def test_many_writers_at_once_make_one_book():
    store, line = MemoryStore(), threading.Barrier(8)
    refused: list[str] = []

    def write(number: int) -> None:
        mine = book(store)
        line.wait(10)
        mine.submit(job(f"own-{number}"))
        try:
            mine.submit(job("contended"))
        except JobRefused as error:
            refused.append(str(error))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    found = book(store).sync()
    assert len(found.entries) == 9 and len(refused) == 7
    assert sorted(store.objects) == [f"services/shop/jobs/{n:010d}.json" for n in range(9)]
    assert [entry.number for entry in found.entries.values()] == list(range(9))


def test_what_has_no_end_is_read_as_it_was_written():
    """JSON knows no infinity, and one event that can not be read would end the service for everybody."""
    store = MemoryStore()
    tree = {
        "tenant": "ann",
        "name": "a",
        "domains": [{"name": "own", "environment": "frozen_lake", "environment_options": {"most": math.inf}}],
        "training": {"max_grad_norm": math.inf},
        "weight": math.inf,
    }
    wanted = validate_as(Job, tree, "job")
    book(store).submit(wanted)
    assert book(store).sync().entry("ann/a").job == wanted


def test_a_reader_sees_what_others_wrote_and_asks_for_one_object_when_nothing_is_new():
    store = MemoryStore()
    one, other = book(store), book(store)
    one.submit(job("a"))
    one.start("ann/a", 2)
    entry = other.sync().entry("ann/a")
    assert (entry.state, entry.trainer, entry.submitted) == (State.RUNNING, 2, 7.0)
    other.end("ann/a", "it broke")
    with pytest.raises(JobRefused, match="job 'ann/a' is failed: ended is for one that is paused or running"):
        one.end("ann/a")
    assert one.jobs.entries == other.jobs.entries
    asked: list[str] = []
    get = store.get
    store.get = lambda key: asked.append(key) or get(key)  # type: ignore[method-assign, func-returns-value]
    one.sync()
    assert asked == ["services/shop/jobs/0000000003.json"]


def test_what_is_no_event_is_told_by_its_key():
    store = MemoryStore()
    store.put("services/shop/jobs/0000000000.json", b'{"kind": "submitted", "time": 1.0}')
    with pytest.raises(LogCorrupt, match=r"services/shop/jobs/0000000000\.json: not an event of this format"):
        book(store).sync()
