"""Which versions the proxy loads, while garbage collection goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from infra.proxy.versions import UnknownVersion, VersionSource
from infra.store.errors import Corrupt, NotFound
from infra.store.log import CommitLog
from rl.records import Mark
from tests.proxy.conftest import make_config
from tests.proxy.memory_store import MemoryStore
from tests.store.samples import commit


def source_of(store: MemoryStore, pull: Any, cache: Path) -> VersionSource:
    config = make_config()
    return VersionSource(CommitLog(store, config.prefix, "proxy"), config.prefix, config.policy, cache, pull)  # type: ignore[arg-type]


@pytest.fixture
def trainer(store: MemoryStore) -> CommitLog:
    log = CommitLog(store, make_config().prefix, "trainer")  # type: ignore[arg-type]
    log.fence()
    for _ in range(6):
        commit(log)
    return log


def test_what_the_floor_let_go_is_loaded_while_it_is_there(
    store: MemoryStore, trainer: CommitLog, tmp_path: Path
) -> None:
    trainer.append_retain(1, Mark.PIN, trainer.ledger.states[1])
    trainer.append_gc_floor(4)
    trainer.append_retain(2, Mark.DELETE)
    pulled: list[str] = []

    def pull(prefix: str, sha: str, cache: Path) -> Path:
        if len(pulled) == 3:
            raise NotFound("b", prefix)
        pulled.append(prefix)
        return cache / str(len(pulled))

    async def play() -> None:
        source = source_of(store, pull, tmp_path)
        view = await source.look()
        assert sorted(view.states) == [1, 4, 5]
        for version in (1, 4, 3):
            assert (await source.directory(view, version)).name == "model"
        for version, why in {0: "deleted meanwhile", 2: "or deleted", 6: "not in the commit log"}.items():
            with pytest.raises(UnknownVersion, match=why):
                await source.directory(view, version)
        source.close()

    asyncio.run(play())
    assert len(pulled) == 3


@pytest.mark.parametrize("found", [NotFound("b", "k"), Corrupt("k", "missing, though the manifest names it")])
def test_a_missing_object_is_corruption_only_where_the_log_still_keeps_the_version(
    store: MemoryStore, trainer: CommitLog, tmp_path: Path, found: Exception
) -> None:
    def pull(*_: Any) -> Path:
        raise found

    async def play() -> None:
        source = source_of(store, pull, tmp_path)
        old = await source.look()
        with pytest.raises(type(found)):
            await source.directory(old, 2)
        trainer.append_gc_floor(4)
        with pytest.raises(UnknownVersion, match="version 2 was deleted"):
            await source.directory(old, 2)
        with pytest.raises(type(found)):
            await source.directory(old, 5)
        source.close()

    asyncio.run(play())
