"""Running the proxy, with its embedded engine or in front of a fleet, in the calling thread.

Invariants
- The port is taken before anything is loaded, and opened when a version is served or the log has none yet.
- It ends when `stop` is set, and by name when its embedded engine dies; nothing it started outlives the call.
- Its copies of base and versions are in a directory of its own; what killed ones left is removed at the start.
- It never touches signal handlers, so it runs in any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import uuid
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path

import uvloop
from starlette.types import ASGIApp

from infra.chat import ChatCodec
from infra.compute.scratch import scratch
from infra.engines.protocol import Engine
from infra.proxy import registry
from infra.proxy.app import make_app
from infra.proxy.auth import Keys
from infra.proxy.control import Proxy
from infra.proxy.external import External
from infra.proxy.fleet import Fleet
from infra.proxy.fleet_metrics import FleetCollector
from infra.proxy.listen import Server, bind, listen
from infra.proxy.tenants import Tenants
from infra.proxy.versions import VersionSource
from infra.store.directories import pull_directory
from infra.store.errors import StoreError
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from infra.store.weights import WeightStore
from rl.config.engine import ExternalEngine, HFEngineSection, VLLMEngineSection
from rl.config.run import RunConfig
from rl.config.tenants import ServiceConfig
from rl.placement import HardwareClass
from rl.routing import Router, Split

PERIOD_S = 0.1
TOKENIZER = ("*.json", "*.jinja")
"""What a proxy without an engine needs of the base model."""
HEAD_PERIODS = 10
"""Periods between two looks for the first version."""

logger = logging.getLogger(__name__)


def serve(
    config: RunConfig,
    host: str,
    port: int,
    cache: Path,
    stop: threading.Event,
    keys: Keys | None = None,
    service: ServiceConfig | None = None,
) -> None:
    """Serve the run until `stop` is set, with files below `cache`; or the jobs of `service`, whose `host` is `config`.
    Without `keys` nobody is asked for one, so `host` should be loopback then.

    Raises PortInUse, ModelUnusable, WeightMismatch, StoreError, or EngineClosed when the embedded engine dies.
    """
    store = ObjectStore.connect(config.store)
    with (
        bind(host, port) as listener,
        scratch(cache, "proxy") as own,
        contextlib.closing(WeightStore.open(config.weights, store)) as weights,
    ):
        whole = config.engine.embedded or bool(external_engines(config))
        base = pull_directory(store, config.base_prefix, None, own / "base", only=None if whole else TOKENIZER)
        engine = embedded(config, base) if config.engine.embedded else fleet(config)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if service is not None:
                assert keys is not None, "tenants are told apart by their keys"
                runner.run(run_tenants(service, engine, listener, stop, keys, store, own, weights.pull, base))
            else:
                log = CommitLog(store, config.prefix, f"proxy-{uuid.uuid4().hex[:8]}")
                source = VersionSource(log, config.prefix, config.policy, own / "states", weights.pull)
                runner.run(run_proxy(Proxy(config, engine, source), listener, stop, keys, base))


def embedded(config: RunConfig, base: Path) -> Engine:
    """The engine of a proxy that has its own."""
    from infra.engines.hf import HFEngine  # brings torch, which a proxy without one does not need

    assert isinstance(config.engine, HFEngineSection)
    return HFEngine(
        base,
        device=config.engine.device,
        dtype=config.model.dtype,
        max_batch=config.engine.max_batch,
        threads=config.engine.threads,
        deterministic=config.deterministic,
        mixed_adapters=config.engine.mixed_adapters,
    )


def fleet(config: RunConfig) -> Fleet:
    """A fleet without engines yet."""
    engine, split = config.engine, None
    if isinstance(engine, VLLMEngineSection) and (section := engine.disaggregation) is not None:
        split = Split(HardwareClass(section.prefill), HardwareClass(section.decode), section.min_prompt)
    router = Router(config.generation, engine.routing.prefill_heavy, split)
    deadlines, most = config.deadlines, engine.routing.max_waiting
    return Fleet(router, control_s=deadlines.control, load_s=deadlines.load, max_waiting=most)


def external_engines(config: RunConfig) -> tuple[ExternalEngine, ...]:
    """Those that somebody else runs."""
    return config.engine.external if isinstance(config.engine, VLLMEngineSection) else ()


async def run_proxy(
    proxy: Proxy, listener: socket.socket, stop: threading.Event, keys: Keys | None = None, base: Path | None = None
) -> None:
    """Serve on a bound socket until `stop` is set. `base` is where the base model lies; sessions of agents and
    external engines need it. Raises EngineClosed when the engine dies."""
    app = make_app(proxy, keys, None if base is None else lambda: ChatCodec.from_directory(base))
    key = "" if keys is None else keys.control
    app.routes.extend(registry.routes(proxy.engine, key, proxy.config.deadlines))
    if isinstance(proxy.engine, Fleet):
        proxy.metrics.registry.register(FleetCollector(proxy.engine))
    looks = count(1)

    async def look() -> None:
        if proxy.serving is None and next(looks) % HEAD_PERIODS == 0:
            try:
                await proxy.load_head()
            except StoreError as error:
                logger.warning("the log can not be read for a first version: %s", error)

    try:
        await proxy.load_head()
        _join_external(proxy.config, proxy.engine, base)
        await _listen(app, proxy.engine, listener, stop, look)
    finally:
        await proxy.close()


async def run_tenants(
    service: ServiceConfig,
    engine: Engine,
    listener: socket.socket,
    stop: threading.Event,
    keys: Keys,
    store: ObjectStore,
    cache: Path,
    pull: Callable[[str, str, Path], Path],
    base: Path,
) -> None:
    """The same for the jobs of a service."""
    tenants = Tenants(service, engine, keys, store, cache, pull, lambda: ChatCodec.from_directory(base))
    if isinstance(engine, Fleet):
        tenants.registry.register(FleetCollector(engine))
    following = asyncio.create_task(tenants.follow())

    async def look() -> None:
        if following.done():
            following.result()

    try:
        _join_external(service.host, engine, base)
        await _listen(tenants, engine, listener, stop, look)
    finally:
        following.cancel()
        await tenants.close()
        await engine.close()


def _join_external(config: RunConfig, engine: Engine, base: Path | None) -> None:
    if base is not None and isinstance(engine, Fleet):
        for external in external_engines(config):
            External(external, config, base).join(engine)


async def _listen(
    app: ASGIApp,
    engine: Engine,
    listener: socket.socket,
    stop: threading.Event,
    look: Callable[[], Awaitable[None]],
) -> None:
    """Answer until `stop` is set; `look` is called every PERIOD_S. Raises EngineClosed when the engine dies."""
    server = Server(app)
    listen(listener)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not stop.is_set() and not running.done():
            await asyncio.sleep(PERIOD_S)
            if not await engine.health():
                await engine.resume()  # raises EngineClosed with the cause
            await look()
    finally:
        server.should_exit = True
        await engine.close()  # what is in flight ends, so that the server can
        await running
