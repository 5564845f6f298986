"""Several trainers and an operator at once, with answers lost: what the log then says must be one history."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from botocore.exceptions import ReadTimeoutError

from infra.store.errors import Overtaken
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.errors import Fenced
from rl.ledger import Ledger
from rl.records import Drop, Fence, Outcome, Reason, Rollback, Step
from rl.trajectory import Uid
from tests.store.conftest import Tap
from tests.store.samples import commit, same

TRAINERS, ROUNDS = 3, 12


def _train(store: ObjectStore, prefix: str, name: str, acknowledged: list[Step]) -> None:
    """Fence, commit the next outstanding attempt until fenced, and fence again, like a trainer that is restarted."""
    tap = Tap(store.client)
    chance = random.Random(name)
    log = CommitLog(ObjectStore(tap, store.bucket), prefix, name)
    for _ in range(ROUNDS):
        log.fence()
        try:
            for _ in range(3):
                if chance.random() < 0.3:
                    tap.after["put_object"] = [ReadTimeoutError(endpoint_url="lost")]
                acknowledged.append(commit(log, [next(iter(log.ledger.outstanding()))]))
        except (Fenced, Overtaken):
            log = CommitLog(ObjectStore(tap, store.bucket), prefix, name)


def _operate(store: ObjectStore, prefix: str) -> None:
    log = CommitLog(store, prefix, "operator")
    for _ in range(ROUNDS):
        uid = next(iter(log.sync().outstanding()))
        try:
            log.append_settle([Drop(uid=str(uid), reason=Reason.STALE, outcome=Outcome.RETRY)])
        except Overtaken:
            continue


@pytest.mark.slow
def test_contending_writers_make_one_history(store: ObjectStore, prefix: str) -> None:
    acknowledged: list[Step] = []
    with ThreadPoolExecutor(TRAINERS + 1) as pool:
        futures = [pool.submit(_train, store, prefix, f"trainer-{n}", acknowledged) for n in range(TRAINERS)]
        futures.append(pool.submit(_operate, store, prefix))
        for future in futures:
            future.result(timeout=240)
    reader = CommitLog(store, prefix, "audit")
    history, ledger, holder = list(reader.records()), Ledger(), ""
    trained: list[Uid] = []
    for record in history:
        ledger.apply(record)  # raises on a doubled ordinal, a repeated version, a wrong base
        if isinstance(record, Fence):
            holder = record.writer
        elif isinstance(record, Step | Rollback):
            assert record.writer == holder, "only the holder of the newest fence commits"
        if isinstance(record, Step):
            trained += map(Uid.parse, record.trained)
    assert len({uid.ordinal for uid in trained}) == len(trained)
    written = {record.nonce for record in history}
    assert {step.nonce for step in acknowledged} <= written, "what was acknowledged is in the log"
    steps = [record for record in history if isinstance(record, Step)]
    assert len(steps) == len(acknowledged), "and nothing else is: every lost answer was resolved"
    assert same(reader.sync(), ledger)
