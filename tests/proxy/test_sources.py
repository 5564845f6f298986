"""Where an engine of a fleet finds the versions of many tenants."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from infra.engines.sources import Sources
from infra.store.log import CommitLog
from tests.proxy.conftest import make_config
from tests.proxy.memory_store import MemoryStore
from tests.store.samples import commit


def test_what_the_proxy_has_here_is_used_and_else_each_tenant_has_its_own(store: MemoryStore, tmp_path: Path) -> None:
    tenants = [f"t{n}.job" for n in range(6)]
    for tenant in tenants:
        log = CommitLog(store, f"{tenant.replace('.', '/')}/", "trainer")  # type: ignore[arg-type]
        log.fence()
        commit(log)
    (here := tmp_path / "here").mkdir()
    pulled: list[str] = []

    def pull(prefix: str, sha: str, cache: Path) -> Path:
        pulled.append(prefix.split("/state/")[0])
        (found := cache / "state").mkdir(parents=True)
        return found

    async def play() -> None:
        sources = Sources(make_config(), store, pull, tmp_path / "own", kept=2)  # type: ignore[arg-type]
        assert await sources.directory("t0.job", 0, str(here)) == here and not pulled
        threads = threading.active_count()
        for tenant in [*tenants, tenants[-1]]:
            found = await sources.directory(tenant, 0, "/nowhere/of/another/machine")
            assert found.name == "model" and found.parent.is_dir()
        assert pulled == [tenant.replace(".", "/") for tenant in tenants], "each once, from its own prefix"
        assert len(list((tmp_path / "own").iterdir())) == 2, "of two tenants something is kept"
        together = await asyncio.gather(*(sources.directory(t, 0, "/nowhere") for t in tenants))
        assert len(set(together)) == 6
        assert len(list((tmp_path / "own").iterdir())) == 2
        sources.close()
        assert threading.active_count() <= threads + 8, "threads of tenants that left end"

    asyncio.run(play())
