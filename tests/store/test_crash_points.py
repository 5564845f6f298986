"""One history, and every way of interrupting it: each part of the run is killed before and after each of its object
operations, and loses each answer, one at a time; the run then goes on from the store alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.store import log as store_log
from rl.records import Mark
from rl.retention import Retention
from rl.selection import DropPolicy
from rl.staleness import StalenessPolicy
from tests.store.memory_s3 import Fate, MemoryS3
from tests.store.world import GRACE_S, Plan, World, play_all, seal, start

Deed = Callable[[World, Plan | None], Any]


def take_over(world: World, plan: Plan | None) -> None:
    world.new_trainer(plan)


def step(world: World, plan: Plan | None) -> None:
    world.train(world.trainers[-1], lambda t: t.step(), plan)


def roll_back(world: World, plan: Plan | None) -> None:
    world.roll_back(world.trainers[-1], 1, plan)


def play(world: World, plan: Plan | None) -> None:
    world.produce(world.producers[-1], play_all, plan)


def seal_together(world: World, plan: Plan | None) -> None:
    world.produce(world.producers[-1], lambda p: (start(p, 1), seal(p, 1, at_once=2)), plan)


def give_up(world: World, plan: Plan | None) -> None:
    world.produce(world.producers[-1], lambda p: (start(p, 0), seal(p, 6, at_once=1)), plan)


def settle(world: World, plan: Plan | None) -> None:
    world.settle(3, plan)


def mark(world: World, plan: Plan | None) -> None:
    world.retain(Mark.PIN, 1, plan)


def collect(world: World, plan: Plan | None) -> None:
    world.server.now += 2 * GRACE_S
    world.collect(plan)


HISTORY: list[Deed] = [
    play, step, play, step, play, step, play, step, mark, collect,
    take_over, seal_together, give_up, settle, play, step, roll_back, collect,
]  # fmt: skip
"""The first ones make a past; of the others every operation is tried."""
TRIED = range(8, len(HISTORY))


def reborn(server: MemoryS3, work: Path) -> World:
    """Fresh processes on a copy of the server, as it was."""
    work.mkdir()
    world = World(StalenessPolicy(1, 2, 3), DropPolicy(), Retention(2), 2, work, server=server.copy())
    world.new_trainer()
    world.new_producer()
    return world


@pytest.mark.slow
@pytest.mark.parametrize("at", TRIED, ids=[f"{at}-{HISTORY[at].__name__}" for at in TRIED])
def test_every_operation_may_be_the_last(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_log, "SNAPSHOT_EVERY", 3)
    before = MemoryS3()
    for n, earlier in enumerate(HISTORY[:at]):
        world = reborn(before, tmp_path / f"before-{n}")
        earlier(world, None)
        before = world.server
    deed, ends = HISTORY[at], 0
    for fate in (Fate.CRASH_BEFORE, Fate.LOSE_ANSWER):
        n, struck, writes = 0, True, -1
        while struck:  # a crash after the n-th operation is one before the next; past the last one nothing befalls it
            world = reborn(before, tmp_path / f"{n}-{fate.value.replace(' ', '-')}")
            done = world.server.operations
            deed(world, Plan(n, fate))
            struck = world.server.struck
            if world.server.writes != writes or not struck:  # else the store is as it was one operation earlier
                world.finish()
                world.audit()
                ends += 1
            n, writes = n + 1, world.server.writes
        assert n > 2 and world.server.operations > done
    assert ends > 3
