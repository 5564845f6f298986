"""Who answers the traffic of `benchmarks.proxy`: each is processes of its own, with `drive` and `close`.

    Bare        one engine, called within its process
    Proxied     a run's proxy, its engine inside or (`apart`) in a process of its own; the requests come from here
    Direct      that engine apart, at its own address, past the proxy
    Served      a vLLM server, at its own address; a `Proxied` can have it as its engine (`external`)

Invariant: `drive` plays the same traffic whoever answers it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import orjson
import psutil
import uvloop

from benchmarks.proxy_traffic import Generate, Traffic, drive
from infra.compute import lifeline
from infra.engines.errors import EngineDidNotStart
from infra.engines.hf import HFEngine
from infra.engines.protocol import Generation, Sampling
from infra.engines.remote import RemoteEngine
from infra.engines.vllm_facts import Facts
from infra.engines.vllm_http import ServerCalls
from infra.engines.vllm_server import VLLMServer
from infra.engines.vllm_wire import GENERATE, Segment, read_event, request
from infra.proxy.auth import Keys
from infra.proxy.client import ControlClient, ProxyClient, ProxyUnavailable
from infra.proxy.fleet import Fleet
from infra.proxy.secret import CONTROL_KEY, SERVERS_KEY
from infra.proxy.serve import serve
from infra.services.processes import free_port
from infra.services.service import HOST
from infra.store.directories import push_directory
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.config.load import dumps, validate
from rl.config.run import RunConfig
from rl.records import StateRef

START_S = 120.0
LENGTH = 4096
"""Tokens of a sequence, as a run's `rollout.max_tokens` is by default."""
CLASS = "bandwidth_gpu"
SPAWN = get_context("spawn")


class Side(Protocol):
    def drive(self, *work: Any) -> Traffic:
        """`proxy_traffic.drive`, its arguments after the first."""

    def close(self) -> None: ...


class Bare:
    """A process with one engine; `drive` there is `Traffic` here."""

    def __init__(self, model: Path, adapters: Sequence[Path] = ()):
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_bare, args=(theirs, model, tuple(adapters)), daemon=True)
        self._process.start()

    def drive(self, *work: Any) -> Traffic:
        self._pipe.send(work)
        found = self._pipe.recv()
        assert isinstance(found, Traffic)
        return found

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _bare(pipe: Connection, model: Path, adapters: tuple[Path, ...]) -> None:
    async def run() -> None:
        engine = HFEngine(model, device="cpu", base_version=0)
        for at, directory in enumerate(adapters):
            await engine.publish_adapter(f"tenant{at}", 1, directory)
        while (work := await asyncio.to_thread(pipe.recv)) is not None:
            pipe.send(await drive(engine.generate, *work))
        await engine.close()

    uvloop.run(run())


class Proxied:
    """A run whose proxy serves in a process of its own, by `infra.proxy.serve` on a real store, with keys."""

    def __init__(
        self,
        store: ObjectStore,
        name: str,
        model: Path,
        work: Path,
        *,
        apart: bool = False,
        external: Served | None = None,
    ):
        self._store = store
        engine: dict[str, Any] = {"device": "cpu"} | ({"instances": {CLASS: 1}} if apart else {})
        if external is not None:
            os.environ[SERVERS_KEY] = external.server.key
            elsewhere = [{"url": external.server.url, "hardware": CLASS}]
            engine = {"type": "vllm", "instances": {CLASS: 0}, "external": elsewhere}
        tree = {
            "name": name,
            "domains": [{"name": "calculator", "environment": "calculator"}],
            "model": {"source": {"type": "pretrained", "path": str(model)}},
            "engine": engine,
            "store": {"bucket": store.bucket},
        }
        self.config = validate(tree, "benchmark")
        push_directory(store, f"{self.config.prefix}base/", model)
        self._log = CommitLog(store, self.config.prefix, "trainer")
        self.fence = self._log.fence()
        self.publish(model)
        self._stop, port, self.keys = SPAWN.Event(), free_port(set()), Keys.random()
        self.url = f"http://{HOST}:{port}"
        place = (self.config, port, work / name, self._stop, self.keys)
        self._process = SPAWN.Process(target=_serve, args=place, daemon=True)
        self._process.start()
        self.control = ControlClient(self.url, START_S, self.fence, self.keys.control)
        self._ends = ExitStack()
        self.engine: int | None = None
        """The process of the engine apart."""
        self._wait(lambda: True)
        if external is not None:
            self._wait(lambda: self.control.status(5.0).engine["ready"] == 1)
        if apart:
            self._start_engine(work / f"{name}-engine")

    def _start_engine(self, home: Path) -> None:
        home.mkdir()
        config = home / "config.json"
        config.write_text(dumps(self.config))
        arguments = ["infra.engines.process", str(config), "bench", CLASS, self.url, HOST, str(home / "work")]
        process = lifeline.spawn(arguments, home / "engine.log", {CONTROL_KEY: self.keys.control})
        self._ends.callback(lifeline.stop, process)
        self.engine, log = process.pid, home / "engine.log"

        def ready() -> bool:
            if process.poll() is not None:
                raise EngineDidNotStart(f"the engine ended: {lifeline.tail(log)}")
            return self.control.status(5.0).engine["ready"] == 1

        self._wait(ready)

    def _wait(self, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + START_S
        while True:
            try:
                self.control.status(5.0)
                if ready():
                    return
            except ProxyUnavailable:
                pass
            if time.monotonic() > end or not self._process.is_alive():
                raise ProxyUnavailable(f"the proxy at {self.url} is not ready after {START_S:.0f} s, or has ended")
            time.sleep(0.1)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def publish(self, model: Path) -> int:
        """Commit a version with this model."""
        prefix = self._log.state_prefix()
        shas = push_directory(self._store, self.config.prefix + prefix, model.parent)
        state = StateRef(prefix=prefix, manifest_sha256=shas, full=False)
        return self._log.append_step(state=state, weights_sha256="0" * 64, alpha=1).version

    def drive(self, *work: Any) -> Traffic:
        async def run() -> Traffic:
            client = ProxyClient(self.url, self.keys.rollout)

            async def generate(tokens: Sequence[int], sampling: Sampling, tenant: str, request: str) -> Any:
                trajectory = request.rpartition("-")[0]
                return await client.generate(
                    trajectory=trajectory, request=request, tenant=tenant, token_ids=tokens, sampling=sampling,
                    start_version=0, deadline_s=START_S, domain="calculator",
                )  # fmt: skip

            try:
                return await drive(generate, *work)
            finally:
                await client.close()

        return uvloop.run(run())

    def close(self) -> None:
        self.control.close()
        self._ends.close()
        self._stop.set()
        self._process.join()


def _serve(config: RunConfig, port: int, cache: Path, stopped: Any, keys: Keys) -> None:
    logging.disable(logging.WARNING)
    stop = threading.Event()

    def watch() -> None:
        stopped.wait()
        stop.set()

    threading.Thread(target=watch, daemon=True).start()
    serve(config, HOST, port, cache, stop, keys)


class Served:
    """A vLLM server as `engine.external` wants it. Raises EngineNotInstalled."""

    def __init__(self, model: Path, home: Path):
        key = secrets.token_urlsafe(32)
        self.server = VLLMServer(model, home=home, port=free_port(set()), key=key, max_model_len=LENGTH)
        self.server.start()
        try:
            self.server.wait_ready()
        except BaseException:
            self.server.close()
            raise

    def drive(self, *work: Any) -> Traffic:
        async def run() -> Traffic:
            calls = ServerCalls(self.server.url, self.server.key, START_S)
            calls.open()
            info = await calls.call("GET", "/server_info?config_format=json")
            model = Facts.of(orjson.loads(info)).name

            async def generate(tokens: Sequence[int], sampling: Sampling, tenant: str, name: str) -> Generation:
                found = Segment()
                async for line in calls.stream(GENERATE, request(model, name, tokens, sampling)):
                    read_event(line, found)
                return Generation(found.token_ids, found.logprobs, "length")

            try:
                return await drive(generate, *work)
            finally:
                await calls.close()

        return uvloop.run(run())

    def close(self) -> None:
        self.server.close()


class Direct:
    """The engine apart of a `Proxied`, which owns it."""

    def __init__(self, proxied: Proxied):
        listening = [c for c in psutil.Process(proxied.engine).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        self._url, self._key = f"http://{HOST}:{listening[0].laddr.port}", proxied.keys.control

    def drive(self, *work: Any) -> Traffic:
        async def run() -> Traffic:
            engine = RemoteEngine(self._url, self._key, Fleet.capabilities, START_S)
            generate: Generate = engine.generate
            try:
                return await drive(generate, *work)
            finally:
                await engine.close()

        return uvloop.run(run())

    def close(self) -> None:
        """Nothing of it is this object's."""
