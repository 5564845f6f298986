"""Running the proxy with its embedded engine in the calling thread.

Invariants
- The port is taken before anything is loaded, and opened when a version is served or the log has none yet.
- It ends when `stop` is set, and by name when the engine dies; nothing it started outlives the call.
- Its copies of base and versions are in a directory of its own; what killed ones left is removed at the start.
- It never touches signal handlers, so it runs in any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop

from infra.compute.scratch import scratch
from infra.engines.hf import HFEngine
from infra.proxy.app import make_app
from infra.proxy.control import Proxy
from infra.proxy.versions import VersionSource
from infra.store.directories import pull_directory
from infra.store.errors import StoreError
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from infra.store.weights import WeightStore
from rl.config.run import RunConfig
from rl.errors import RollmillError

PERIOD_S = 0.1
HEAD_PERIODS = 10
"""Periods between two looks for the first version."""
GRACE_S = 5

logger = logging.getLogger(__name__)


class PortInUse(RollmillError):
    """Another process listens on the port."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(config: RunConfig, host: str, port: int, cache: Path, stop: threading.Event) -> None:
    """Serve the run until `stop` is set, with files below `cache`. `host` should be loopback: nothing here
    authenticates a caller.

    Raises PortInUse, ModelUnusable, WeightMismatch, StoreError, or EngineClosed when the engine dies.
    """
    store = ObjectStore.connect(config.store)
    with (
        _bind(host, port) as listener,
        scratch(cache, "proxy") as own,
        contextlib.closing(WeightStore.open(config.weights, store)) as weights,
    ):
        base = pull_directory(store, f"{config.prefix}base/", None, own / "base")
        log = CommitLog(store, config.prefix, f"proxy-{uuid.uuid4().hex[:8]}")
        source = VersionSource(log, config.prefix, config.policy, own / "states", weights.pull)
        engine = HFEngine(
            base,
            device=config.engine.device,
            dtype=config.model.dtype,
            max_batch=config.engine.max_batch,
            threads=config.engine.threads,
            deterministic=config.deterministic,
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(Proxy(config, engine, source), listener, stop))


async def _serve(proxy: Proxy, listener: socket.socket, stop: threading.Event) -> None:
    settings = uvicorn.Config(
        make_app(proxy),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(settings)
    running: asyncio.Task[None] | None = None
    try:
        await proxy.load_head()
        _listen(listener)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        periods = 0
        while not stop.is_set() and not running.done():
            await asyncio.sleep(PERIOD_S)
            periods += 1
            if not await proxy.engine.health():
                await proxy.engine.resume()  # raises EngineClosed with the cause
            if proxy.serving is None and periods % HEAD_PERIODS == 0:
                try:
                    await proxy.load_head()
                except StoreError as error:
                    logger.warning("the log can not be read for a first version: %s", error)
    finally:
        server.should_exit = True
        await proxy.close()
        if running is not None:
            await running


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _named(error, host, port) from error
    return listener


def _listen(listener: socket.socket) -> None:
    try:
        listener.listen(2048)
    except OSError as error:
        host, port, *_ = listener.getsockname()
        raise _named(error, host, port) from error


def _named(error: OSError, host: str, port: int) -> RollmillError:
    if error.errno == errno.EADDRINUSE:
        return PortInUse(f"port {port} of {host} is in use by another process; stop it or choose another port")
    return RollmillError(f"{host}:{port} can not be bound: {error.strerror}")
