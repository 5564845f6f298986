"""A proxy over HTTP on loopback, in front of a small random model, with a trainer's side to drive it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.engines.hf import HFEngine
from infra.engines.protocol import BASE, Sampling
from infra.proxy.client import ControlClient, ProxyClient
from infra.proxy.control import Proxy
from infra.proxy.listen import bind
from infra.proxy.serve import run_proxy
from infra.proxy.versions import VersionSource
from infra.store.directories import push_directory
from infra.store.log import CommitLog
from infra.store.weights import WeightStore
from rl.config.load import validate
from rl.config.run import RunConfig
from rl.records import StateRef
from tests.engines.tiny_models import prompt, save_model
from tests.proxy.memory_store import MemoryStore


def make_config(**changes: Any) -> RunConfig:
    tree = {
        "name": "test",
        "domains": [{"name": "lake", "environment": "envs.frozen_lake:FrozenLake"}],
        "model": {"source": {"type": "pretrained", "path": "unused"}},
        "engine": {"device": "cpu", "max_batch": 4},
    }
    return validate(tree | changes, "test")


class Trainer:
    """Publishes versions the way a trainer does."""

    def __init__(self, store: Any, config: RunConfig, writer: str = "trainer"):
        self.store, self.config = store, config
        self.log = CommitLog(store, config.prefix, writer)
        self.fence = self.log.fence()

    def publish(self, model: Path) -> int:
        """Commit a version whose state is this model directory."""
        prefix = self.log.state_prefix()
        parent = model.parent
        assert model.name == "model"
        digest = push_directory(self.store, self.config.prefix + prefix, parent)
        state = StateRef(prefix=prefix, manifest_sha256=digest, full=False)
        return self.log.append_step(state=state, weights_sha256="0" * 64, alpha=1).version


@dataclass
class Running:
    """One proxy that serves, and both its clients."""

    proxy: Proxy
    client: ProxyClient
    url: str
    stop: threading.Event
    task: asyncio.Task[None]

    def control(self, fence: int, deadline_s: float = 20.0) -> ControlClient:
        return ControlClient(self.url, deadline_s, fence)

    def turn(self, trajectory: str = "t", tokens: list[int] | None = None, **changes: Any) -> asyncio.Future:
        """Start one generation."""
        call = {
            "trajectory": trajectory,
            "request": f"{trajectory}-0",
            "tenant": BASE,
            "token_ids": tokens or prompt(8),
            "sampling": Sampling(1.0, 6, (), 3),
            "start_version": 0,
            "deadline_s": 20.0,
        }
        return asyncio.ensure_future(self.client.generate(**(call | changes)))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.002)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three state directories' `model/`, of one shape."""
    return [save_model(tmp_path_factory.mktemp(f"state{seed}") / "model", seed=seed) for seed in range(3)]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def start(store: MemoryStore, models: list[Path], tmp_path: Path) -> AsyncIterator[Callable]:
    """Start proxies on free ports; they are stopped at the end."""
    runs: list[Running] = []

    async def make(config: RunConfig | None = None) -> Running:
        config = config or make_config()
        log = CommitLog(store, config.prefix, "proxy")
        cache = tmp_path / f"cache{len(runs)}"
        source = VersionSource(log, config.prefix, config.policy, cache, WeightStore(store).pull)
        engine = HFEngine(models[0], device="cpu", max_batch=config.engine.max_batch)
        proxy, stop, listener = Proxy(config, engine, source), threading.Event(), bind("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        task = asyncio.create_task(run_proxy(proxy, listener, stop))
        runs.append(Running(proxy, ProxyClient(url), url, stop, task))
        return runs[-1]

    yield make
    for run in runs:
        await run.client.close()
        run.stop.set()
        await asyncio.gather(run.task, return_exceptions=True)
