"""`python -m infra.engines.process CONFIG NAME CLASS PROXY HOST WORK_DIR`: one engine of a fleet, in its process.

    base model from the store -> engine -> its host on a free port -> reports to the proxy, again and again

Invariants
- It ends with the task that started it, whatever ends that, and takes its vLLM with it.
- It ends with code 1, to be started anew, when its engine is broken or the proxy has taken it out.
- Keys are in the environment alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import threading
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import orjson
import typer
import uvloop

from infra.compute.lifeline import CRASHED, NAMED, die_with_parent, last_words
from infra.compute.scratch import scratch
from infra.engines.errors import EngineClosed, EngineDidNotStart
from infra.engines.host import make_host
from infra.engines.launch import Started, start_engine
from infra.engines.sources import Sources
from infra.proxy.listen import Server, bind, listen
from infra.proxy.secret import CONTROL_KEY
from infra.store.directories import pull_directory
from infra.store.objects import ObjectStore
from infra.store.weights import WeightStore
from rl.config.load import loads
from rl.config.run import RunConfig
from rl.errors import RollmillError

BEAT_S = 1.0
BEAT_WITHIN_S = 10.0

logger = logging.getLogger(__name__)


class Replaced(RollmillError):
    """The proxy has taken this engine out."""


def run(config: RunConfig, name: str, hardware: str, proxy: str, host: str, work_dir: Path, key: str) -> None:
    """Until the process is told to end. Raises the named errors of engine and store, and Replaced."""
    store = ObjectStore.connect(config.store)
    with (
        bind(host, 0) as listener,
        scratch(work_dir, f"engine-{name}") as own,
        contextlib.closing(WeightStore.open(config.weights, store)) as weights,
    ):
        base = pull_directory(store, config.base_prefix, None, own / "base")
        sources = Sources(config, store, weights.pull, own / "states")
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())

        async def main() -> None:
            try:
                async with start_engine(config, hardware, base, own, stop) as started:
                    server = Server(make_host(started.engine, key, sources.directory))
                    listen(listener)
                    serving = asyncio.create_task(server.serve(sockets=[listener]))
                    try:
                        await _report(started, name, hardware, _address(listener), proxy, key, stop)
                    finally:
                        server.should_exit = True
                        await started.engine.close()  # what is in flight ends, so that the server can
                        await serving
            finally:
                sources.close()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())


async def _report(
    started: Started, name: str, hardware: str, url: str, proxy: str, key: str, stop: threading.Event
) -> None:
    """Tell the proxy that the engine is here, until the process ends. Raises Replaced, EngineClosed."""
    body = orjson.dumps(
        {
            "incarnation": uuid.uuid4().hex,
            "url": url,
            "hardware": hardware,
            "slots": started.slots,
            "capacity": started.capacity,
            "capabilities": dataclasses.asdict(started.engine.capabilities),
        }
    )
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    within = aiohttp.ClientTimeout(total=BEAT_WITHIN_S)
    async with aiohttp.ClientSession(headers=headers, timeout=within, trust_env=False) as http:
        async for _ in _beats(stop):
            if not await started.engine.health():
                raise EngineClosed(f"engine {name} is broken")
            try:
                async with http.post(f"{proxy}/control/engines/{name}", data=body) as reply:
                    answer = orjson.loads(await reply.read())
            except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
                logger.warning("the proxy at %s can not be reached: %s", proxy, error)
                continue
            if reply.status != 200:
                raise RollmillError(f"the proxy refuses engine {name}: {answer.get('detail', reply.status)}")
            if answer["state"] == "lost":
                raise Replaced(f"the proxy has taken engine {name} out")


async def _beats(stop: threading.Event) -> AsyncIterator[None]:
    while not stop.is_set():
        yield
        await asyncio.sleep(BEAT_S)


def _address(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def main(config_file: Path, name: str, hardware: str, proxy: str, host: str, work_dir: Path) -> None:
    """One engine of a fleet, as a process of its own."""
    die_with_parent()
    key = os.environ.pop(CONTROL_KEY)
    try:
        run(loads(config_file.read_text()), name, hardware, proxy, host, work_dir, key)
    except (Replaced, EngineClosed, EngineDidNotStart) as error:
        last_words(f"engine {name}", error)
        raise SystemExit(CRASHED) from None
    except RollmillError as error:
        last_words(f"engine {name}", error)
        raise SystemExit(NAMED) from None


if __name__ == "__main__":
    typer.run(main)
