"""Real endpoints with real processes, and a user's package of rewards."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from infra.serverless.bundle import Bundle, link_runtime
from infra.serverless.client import FunctionClient, lambda_client
from infra.serverless.instance import Layout
from infra.serverless.local import HANDLER, Endpoint
from infra.store.objects import ObjectStore
from rewards.protocol import TrajectoryView
from rl.trajectory import Message, Problem, Status
from tasks.functions import bundle_of
from tests.serverless import toys

TOYS = ("good", "process", "waiting", "endless", "crash", "hog", "many", "poison", "size")


@dataclass
class Served:
    """An endpoint in a thread of this process, so that a test can look inside."""

    url: str
    endpoint: Endpoint
    logs: Path

    def client(self, store: ObjectStore | None = None) -> FunctionClient:
        return FunctionClient(lambda_client("us-east-1", self.url, 60, connections=16), "t", store)


Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def toy_bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    with toys.installed(tmp_path_factory.mktemp("user")) as package:
        yield bundle_of(f"{package}:{name}" for name in TOYS)


@pytest.fixture(scope="session")
def layout(toy_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Layout:
    home = tmp_path_factory.mktemp("layout")
    toy_bundle.link(home / "code")
    link_runtime(home / "runtime")
    (home / "logs").mkdir()
    return Layout(home / "code", home / "runtime", home / "logs")


@pytest.fixture
def serve(toy_bundle: Bundle, layout: Layout) -> Iterator[Serve]:
    """`serve(concurrency=..., idle_s=..., handler=...)`: an endpoint that is gone after the test."""
    with ExitStack() as stack:

        def start(concurrency: int = 4, idle_s: float = 300, handler: str = HANDLER, where: Layout = layout) -> Served:
            functions = {f"t-{f.name}": f for f in toy_bundle.functions}
            return stack.enter_context(running(functions, where, concurrency, idle_s, handler))

        yield start


@contextmanager
def running(functions, where: Layout, concurrency: int, idle_s: float, handler: str) -> Iterator[Served]:
    ready, loop = threading.Event(), asyncio.new_event_loop()
    found: list[Served] = []
    stop = asyncio.Event()

    async def body() -> None:
        endpoint = Endpoint(functions, where, concurrency, idle_s, handler)
        runner = web.AppRunner(endpoint.app(), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.append(Served(f"http://127.0.0.1:{runner.addresses[0][1]}", endpoint, where.logs))
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(body()))
    thread.start()
    try:
        assert ready.wait(30)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


def view(text: str = "hi", reward: float = 0.5, **info: object) -> TrajectoryView:
    messages = [Message("user", "question"), Message("assistant", text)]
    return TrajectoryView(Problem(3, "d", 7, 1), messages, Status.TERMINATED, 1, 5, reward, info)


def event(name: str, *views: TrajectoryView, **options: object) -> dict:
    """For a toy."""
    return {"reward": f"toy_rewards:{name}", "options": options, "views": [v.as_json() for v in views or (view(),)]}


def eventually(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within the deadline"
        time.sleep(0.02)
