"""The stage score: parts of the reward, or a failure by name, in time, and the slot is free again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Scheduler, SpecCluster, Worker

from rewards.protocol import TrajectoryView
from rl.config.load import validate
from rl.errors import RewardFailure
from rl.trajectory import Message, Problem, Status, Trajectory, Uid
from tasks import runtime
from tasks.score import score

THREADS: list[threading.Thread] = []
RELEASE = threading.Event()


def turns(view: TrajectoryView) -> dict[str, float]:
    THREADS.append(threading.current_thread())
    return {"turns": view.turns}


def hanging(view: TrajectoryView) -> dict[str, float]:
    THREADS.append(threading.current_thread())
    RELEASE.wait(60)
    return {"late": 1.0}


def leaving(view: TrajectoryView) -> dict[str, float]:
    raise SystemExit(3)


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Two runs with a domain for every reward above, installed in this process."""
    rewards = {f.__name__: f"{__name__}:{f.__name__}" for f in (turns, hanging, leaving)}
    tree: dict[str, Any] = {
        "name": "t",
        "model": {"source": {"type": "pretrained", "path": "unused"}},
        "domains": [{"name": n, "environment": "frozen_lake", "reward": at} for n, at in rewards.items()],
    }
    for run, seconds in (("patient", 60), ("brief", 0.2)):
        config = validate(tree | {"deadlines": {"score": seconds}}, "test")
        made = runtime.Runtime(config, "http://127.0.0.1:9", tmp_path)
        monkeypatch.setitem(runtime._RUNTIMES, run, made)
    THREADS.clear()
    RELEASE.clear()
    yield
    RELEASE.set()
    for thread in THREADS:
        thread.join(10)


def trajectory(domain: str) -> Trajectory:
    problem = Problem(0, domain, 0, 1)
    return Trajectory(Uid(0, 0), 0, problem, 0, 1, [1, 2], [0, 1], [0.0, -1.0], [0, 0], [], Status.TERMINATED, 3)


async def test_a_reward_gives_parts_and_a_span() -> None:
    scored = await score("patient", trajectory("turns"))
    assert scored.rewards == {"turns": 3.0} and [span.stage for span in scored.spans] == ["score"]
    assert THREADS[0].daemon  # the interpreter does not wait for it


async def test_a_reward_that_hangs_is_a_failure_that_names_the_deadline() -> None:
    ours = trajectory("hanging")
    with pytest.raises(RewardFailure, match=r"'hanging' gave nothing within deadlines\.score \(0\.2 s\)"):
        await score("brief", ours)
    RELEASE.set()
    THREADS[0].join(10)
    assert not ours.rewards  # what comes late is dropped


async def test_a_reward_that_exits_ends_only_itself() -> None:
    with pytest.raises(RewardFailure, match="SystemExit: 3"):
        await score("patient", trajectory("leaving"))


def test_the_slot_is_free_after_a_reward_that_hangs() -> None:
    options = {"nthreads": 1, "resources": {"lambda": 1}, "dashboard": False}
    spec = SpecCluster(
        workers={"lambda": {"cls": Worker, "options": options}},
        scheduler={"cls": Scheduler, "options": {"protocol": "inproc", "port": 0, "dashboard": False}},
    )
    with spec, Client(spec, set_as_default=False) as client:
        stuck, after = (
            client.submit(score, run, trajectory(domain), pure=False, resources={"lambda": 1})
            for run, domain in (("brief", "hanging"), ("patient", "turns"))
        )
        assert after.result(timeout=30).rewards == {"turns": 3.0}
        assert isinstance(stuck.exception(timeout=30), RewardFailure)
        assert THREADS[0].is_alive()


@pytest.mark.slow
async def test_a_reward_with_the_mark_runs_as_a_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "name": "t",
        "model": {"source": {"type": "pretrained", "path": "unused"}},
        "domains": [{"name": "maths", "environment": "calculator", "reward": [{"name": "math"}, {"name": "outcome"}]}],
        "serverless": {"type": "local", "concurrency": 1},
        "deadlines": {"score": 120},
    }
    made = runtime.Runtime(validate(tree, "test"), "http://127.0.0.1:9", tmp_path)
    monkeypatch.setitem(runtime._RUNTIMES, "functions", made)
    ours = trajectory("maths")
    ours.messages, ours.info = [Message("assistant", r"\boxed{1/2}")], {"answer": "0.5"}
    try:
        assert (await score("functions", ours)).rewards == {"math": 1.0, "outcome": 0.0}
        assert "REPORT" in (tmp_path / "functions" / "logs" / "math.log").read_text()
    finally:
        made.rewards.close()
