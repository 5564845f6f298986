"""Agents in a process of their own, with a toy in place of a library."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest

from envs.adapters.child import ROOT, ChildFailed
from envs.adapters.hosts import Host
from rl.trajectory import Problem

CLIENT = {"base_url": "http://127.0.0.1:1/v1", "api_key": "k"}
DRIVER = """
import asyncio, sys
from tests.envs.adapters.test_hosts import CLIENT, host, problem
from pathlib import Path

async def main():
    toy = host(Path(sys.argv[1]))
    found = await toy.play(problem("start"), CLIENT)
    print(found["pid"], found["child"], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def host(notes: Path) -> Host:
    return Host.of(sys.executable, "tests.envs.adapters.toy_agents:Toy", {"notes": str(notes)})


def problem(domain: str, index: int = 0, seed: int = 0) -> Problem:
    return Problem(index, domain, index, seed)


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = monotonic() + seconds
    while not condition():
        assert monotonic() < end, "not within the deadline"
        sleep(0.01)


async def ended(toy: Host) -> None:
    toy.retire()
    await asyncio.wait_for(toy.ended(), 30)


async def test_episodes_are_played_side_by_side_in_one_process(tmp_path: Path) -> None:
    toy = host(tmp_path)
    assert host(tmp_path) is toy
    found = await asyncio.gather(*(toy.play(problem("wait", 5, seed), {"api_key": str(seed)}) for seed in range(5)))
    assert [(f["seed"], f["key"]) for f in found] == [(seed, str(seed)) for seed in range(5)]
    assert {f["pid"] for f in found} == {toy.pid}
    await ended(toy)
    assert (tmp_path / "closed").exists() and not psutil.pid_exists(toy.pid)
    again = host(tmp_path)
    assert (await again.play(problem("wait"), CLIENT))["pid"] != toy.pid
    await ended(again)


async def test_what_one_episode_raises_is_its_own_failure(tmp_path: Path) -> None:
    toy = host(tmp_path)
    waiting = asyncio.ensure_future(toy.play(problem("wait", 2), CLIENT))
    with pytest.raises(ChildFailed, match="ZeroDivisionError: no answer"):
        await toy.play(problem("raise"), CLIENT)
    await toy.play(problem("wait", 2), CLIENT)
    await waiting
    await ended(toy)


async def test_a_cancelled_episode_is_cancelled_there_and_others_go_on(tmp_path: Path) -> None:
    toy = host(tmp_path)
    hanging = asyncio.ensure_future(toy.play(problem("hang"), CLIENT))
    async with asyncio.timeout(30):
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.01)
        hanging.cancel()
        while not (tmp_path / "cancelled").exists():
            await asyncio.sleep(0.01)
    await toy.play(problem("wait"), CLIENT)
    await ended(toy)


async def test_the_death_of_the_process_fails_its_episodes_by_name_and_another_one_follows(tmp_path: Path) -> None:
    toy = host(tmp_path)
    hanging = asyncio.ensure_future(toy.play(problem("hang"), CLIENT))
    with pytest.raises(ChildFailed, match=r"its process ended; it last wrote: [\s\S]*these are my last words"):
        await toy.play(problem("die"), CLIENT)
    with pytest.raises(ChildFailed, match="its process ended"):
        await hanging
    assert host(tmp_path) is not toy
    await host(tmp_path).play(problem("wait"), CLIENT)
    await ended(host(tmp_path))


async def test_what_can_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"python \('/nowhere'\) is no interpreter"):
        Host.of("/nowhere", "toy", {})
    with pytest.raises(ChildFailed, match="ValueError: notes must be a directory"):
        await Host.of(sys.executable, "tests.envs.adapters.toy_agents:Toy", {"notes": ""}).play(problem("wait"), CLIENT)
    with pytest.raises(ChildFailed, match="ModuleNotFoundError: No module named 'toys'"):
        await Host.of(sys.executable, "toys:Toy", {}).play(problem("wait"), CLIENT)


def test_nothing_is_left_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert driver.stdout
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
    driver.kill()
    driver.communicate()
    until(lambda: not any(map(psutil.pid_exists, pids)))
    assert (tmp_path / "closed").exists()
