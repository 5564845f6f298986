"""A proxy that asks for keys, in front of the small Qwen3, for agents that speak OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from openai import AsyncOpenAI

from infra.chat import ChatCodec
from infra.engines.hf import HFEngine
from infra.engines.protocol import BASE
from infra.proxy.app import make_app
from infra.proxy.auth import Keys
from infra.proxy.client import ControlClient, ProxyClient
from infra.proxy.control import Proxy
from infra.proxy.session_wire import Opened, SessionBody, SessionRecord
from infra.proxy.versions import VersionSource
from infra.store.log import CommitLog
from infra.store.weights import WeightStore
from rl.config.run import RunConfig
from rl.sessions import Said
from tests.proxy.agents.qwen import Lesson
from tests.proxy.agents.words import ADD, ANSWER, CALL, QUESTION
from tests.proxy.conftest import Trainer, make_config
from tests.proxy.memory_store import MemoryStore

LESSON = Lesson([[Said("user", QUESTION)], [Said("tool", "5")]], [CALL, ANSWER], [ADD])


@dataclass
class AgentProxy:
    proxy: Proxy
    url: str
    keys: Keys
    rollout: ProxyClient
    trainer: Trainer

    def control(self) -> ControlClient:
        return ControlClient(self.url, 20.0, self.trainer.fence, self.keys.control)

    async def open(self, trajectory: str = "t", **changes: Any) -> Opened:
        body: dict[str, Any] = {
            "trajectory": trajectory,
            "tenant": BASE,
            "domain": "lake",
            "start_version": 0,
            "temperature": 0.1,
            "max_new_tokens": 64,
            "max_tokens": 2000,
            "max_turns": 20,
            "deadline_s": 300,
        }
        return await self.rollout.open_session(SessionBody(**(body | changes)), 20.0)

    async def close(self, opened: Opened) -> SessionRecord:
        return await self.rollout.close_session(opened, 20.0)


def client(opened: Opened) -> AsyncOpenAI:
    """OpenAI's own client, as an agent would make it."""
    return AsyncOpenAI(base_url=opened.base_url, api_key=opened.token, max_retries=0, timeout=30.0)


@contextlib.asynccontextmanager
async def serving(model: Path, cache: Path, config: RunConfig | None = None) -> AsyncIterator[AgentProxy]:
    config, store, keys = config or make_config(), MemoryStore(), Keys.random()
    trainer = Trainer(store, config)
    trainer.publish(model)
    log = CommitLog(store, config.prefix, "proxy")
    source = VersionSource(log, config.prefix, config.policy, cache, WeightStore(store).pull)
    proxy = Proxy(config, HFEngine(model, device="cpu", max_batch=4), source)
    await proxy.load_head()
    app = make_app(proxy, keys, lambda: ChatCodec.from_directory(model))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, ws="none", lifespan="off", log_config=None))
    server.install_signal_handlers = lambda: None  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    running = AgentProxy(proxy, url, keys, ProxyClient(url, keys.rollout), trainer)
    try:
        yield running
    finally:
        await running.rollout.close()
        await proxy.close()
        server.should_exit = True
        await task
