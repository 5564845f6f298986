"""Blocking environments: one thread each, that ends with its instance and that nobody waits for."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading

import pytest

from envs.protocol import Step, SyncEnvironment
from envs.threads import ExitInThread, Lane, in_daemon
from rl.trajectory import Message, Problem

PROBLEM = Problem(0, "d", 0, 1)


class Blocking(SyncEnvironment):
    def __init__(self) -> None:
        self.threads: list[int] = []
        self.go_on = threading.Event()
        self.closed = threading.Event()

    def reset_sync(self, problem: Problem) -> list[Message]:
        self.threads.append(threading.get_ident())
        return [Message("user", "go")]

    def step_sync(self, action: str) -> Step:
        self.threads.append(threading.get_ident())
        if action == "hang":
            self.go_on.wait(60)
        return Step(Message("user", "done"))

    def close_sync(self) -> None:
        self.threads.append(threading.get_ident())
        self.closed.set()


async def test_all_calls_of_an_instance_run_in_one_thread_of_its_own() -> None:
    one, two = Blocking(), Blocking()
    for environment in (one, two):
        await environment.reset(PROBLEM)
        await environment.step("a")
        await environment.close()
    assert len(one.threads) == 3 and len({*one.threads}) == 1
    assert {*one.threads}.isdisjoint({*two.threads, threading.get_ident()})


async def test_closing_does_not_wait_for_a_call_that_hangs_and_follows_it() -> None:
    environment = Blocking()
    await environment.reset(PROBLEM)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await environment.step("hang")
    await environment.close()
    assert not environment.closed.is_set()
    environment.go_on.set()
    assert await asyncio.to_thread(environment.closed.wait, 10)


async def test_a_thread_ends_when_its_instance_is_forgotten() -> None:
    environment = Blocking()
    await environment.reset(PROBLEM)
    thread = next(t for t in threading.enumerate() if t.ident == environment.threads[0])
    del environment
    gc.collect()
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()


async def test_an_exit_in_a_thread_is_an_error_of_the_call() -> None:
    with pytest.raises(ExitInThread, match="SystemExit: 3"):
        await in_daemon(lambda: sys.exit(3), "test")
    with pytest.raises(RuntimeError, match="StopIteration"):
        await in_daemon(lambda: next(iter(())), "test")


def test_a_thread_that_hangs_does_not_delay_the_end_of_its_process() -> None:
    program = (
        "import asyncio, threading\n"
        "from envs.threads import in_daemon\n"
        "async def main():\n"
        "    async with asyncio.timeout(0.1):\n"
        "        await in_daemon(threading.Event().wait, 'hang')\n"
        "try:\n"
        "    asyncio.run(main())\n"
        "except TimeoutError:\n"
        "    print('given up')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=True)
    assert done.stdout == "given up\n"


async def test_a_lane_is_idle_as_soon_as_its_answer_is_there() -> None:
    lane = Lane("test")
    for n in range(300):
        assert await lane.call(lambda n=n: n) == n  # type: ignore[misc]
        assert not lane.busy
    lane.end()
