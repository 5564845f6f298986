"""The whole trainer on a real store: order, records, crashes, fences, replays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from infra.services.endpoints import S3Endpoint
from infra.store.directories import pull_directory
from infra.store.flights import Flights
from infra.training import setup
from rl.records import Step
from rl.trajectory import Uid
from tests.training.scene import Scene
from tests.training.small import hash_of, make_group

pytestmark = pytest.mark.server

FAR: dict[str, Any] = {"staleness": {"alpha": 8}}
"""All batches may be sealed beforehand, so that the batches do not depend on time."""


@pytest.fixture
def scene(s3: S3Endpoint, base: Path, tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(**changes: Any) -> Scene:
        (work := tmp_path / str(len(made))).mkdir()
        made.append(Scene(s3, base, work, **changes))
        return made[-1]

    yield make
    for one in made:
        one.close()


def hashes(steps: list[Step]) -> list[str]:
    return [step.weights_sha256 for step in steps]


def test_a_run_from_nothing(scene: Callable[..., Scene], base: Path) -> None:
    run = scene(**FAR)
    run.seal_many(12)
    assert run.train_here() == 0
    steps = run.steps()
    assert [s.version for s in steps] == [0, 1, 2, 3, 4]
    assert steps[0].weights_sha256 == hash_of(setup.load_model(base, "float32"))
    assert len(set(hashes(steps))) == 5
    assert [uid for s in steps for uid in s.trained] == [f"{i}.0" for i in range(12)]
    fence = run.log().ledger.fence
    swap = ["suspend", "update", "resume"]
    assert run.proxy.names == swap + ["prefetch", *swap] * 4
    updates = [body for name, body in run.proxy.calls if name == "update"]
    assert updates == [{"fence": fence, "version": v, "oldest_viable": 0} for v in range(5)]
    metrics = steps[4].metrics
    assert metrics["lag_max"] == 3 and metrics["trajectories"] == 12
    for name in (
        "reward",
        "entropy",
        "grad_norm",
        "ess",
        "mismatch_kl",
        "wait_s",
        "train_s",
        "swap_s",
        "stall_s",
        "push_s",
    ):
        assert name in metrics
    assert metrics["span_wait_end"] <= metrics["span_train_start"]
    assert metrics["span_train_end"] <= metrics["span_stall_start"] <= metrics["span_push_start"]
    pulled = pull_directory(run.store, run.config.prefix + steps[4].state.prefix, None, run.work / "got")
    assert hash_of(setup.load_model(pulled / "model", "float32")) == steps[4].weights_sha256


def test_in_the_six_steps_the_engines_wait_for_the_batch(scene: Callable[..., Scene]) -> None:
    run = scene(staleness={"alpha": 8, "mode": "six_steps"})
    run.seal_many(12)
    assert run.train_here() == 0
    assert run.proxy.names == ["suspend", "update", "resume", "prefetch"] * 4
    assert [body["version"] for name, body in run.proxy.calls if name == "update"] == [0, 1, 2, 3]
    metrics = run.steps()[4].metrics
    assert metrics["span_wait_end"] <= min(metrics["span_swap_start"], metrics["span_train_start"])


def test_a_step_waits_for_what_it_would_make_too_old(scene: Callable[..., Scene]) -> None:
    """Version 1 is made of what is there; for version 2 the one group that is in flight since version 0 is due."""
    run = scene(staleness={"alpha": 1}, training={"steps": 2})
    flights = Flights(run.store, run.config.prefix)
    flights.tell({Uid(3, 0): 0})
    run.seal_many(3)

    def roll(name: str, body: dict[str, Any]) -> None:
        if name == "resume" and run.log().ledger.head == 1:
            run.seal([make_group(i, 4, version=1) for i in (4, 5, 6)])
            threading.Timer(0.5, lambda: run.seal([make_group(3, 4, version=0)])).start()

    run.proxy.react = roll
    assert run.train_here() == 0
    assert "3.0" in run.steps()[2].trained and not run.log().ledger.dropped_groups


def test_alpha_zero_updates_first_and_trains_only_the_head(scene: Callable[..., Scene]) -> None:
    run = scene(staleness={"alpha": 0}, training={"steps": 2})

    def roll(name: str, body: dict[str, Any]) -> None:
        if name == "resume":
            version = run.log().ledger.head or 0
            run.seal([make_group(10 * version + i, 4, version=version) for i in range(4)])

    run.proxy.react = roll
    assert run.train_here() == 0
    assert run.proxy.names == ["suspend", "update", "resume"] * 2
    steps = run.steps()
    assert [s.metrics["lag_max"] for s in steps[1:]] == [0, 0]
    assert [s.trained for s in steps[1:]] == [("0.0", "1.0", "2.0"), ("10.0", "11.0", "12.0")]
    assert [[d.uid for d in s.dropped] for s in steps[1:]] == [["3.0"], ["13.0"]]


def test_lora_publishes_adapters_on_an_unchanged_base(scene: Callable[..., Scene], base: Path) -> None:
    run = scene(**FAR, model={"lora": {"rank": 4, "alpha": 8}}, training={"steps": 2})
    run.seal_many(6)
    assert run.train_here() == 0
    steps = run.steps()
    ids, outputs = torch.tensor([[5, 6, 7]]), []
    for step in steps:
        where = pull_directory(run.store, run.config.prefix + step.state.prefix, None, run.work / "got")
        assert not (where / "model" / "model.safetensors").exists()
        model = setup.load_model(base, "float32")
        plain = model(ids).logits
        outputs.append(PeftModel.from_pretrained(model, where / "model")(ids).logits)
    assert torch.equal(outputs[0], plain)
    assert not torch.equal(outputs[1], plain) and not torch.equal(outputs[2], outputs[1])


@pytest.mark.parametrize("every", [1, 3])
def test_a_later_trainer_replays_and_goes_on_bit_by_bit(scene: Callable[..., Scene], every: int) -> None:
    want = scene(**FAR, training={"steps": 5, "checkpoint_every": every})
    want.seal_many(15)
    assert want.train_here() == 0
    run = scene(**FAR, training={"steps": 2, "checkpoint_every": 3})
    run.seal_many(15)
    assert run.train_here() == 0
    run.change(training={"steps": 4})
    assert run.train_here() == 0
    run.change(training={"steps": 5})
    assert run.train_here() == 0
    assert hashes(run.steps()) == hashes(want.steps())
    assert [s.state.full for s in run.steps()] == [True, False, True, True, True, True]
    assert run.train_here() == 0 and len(run.steps()) == 6  # nothing left to do


def test_a_replay_that_diverges_is_named(
    scene: Callable[..., Scene], capsys: pytest.CaptureFixture[str]
) -> None:
    run = scene(**FAR, training={"steps": 1, "checkpoint_every": 5})
    run.seal_many(6)
    # what was logged at version 1 is not a full checkpoint only if the run was to go on
    run.change(training={"steps": 2})
    run.proxy.react = lambda name, body: (
        run.log().fence() if (name, body.get("version")) == ("update", 1) else None
    )
    assert run.train_here() == 3
    run.proxy.react = lambda name, body: None
    run.change(training={"loss": "grpo"})
    assert run.train_here() == 4
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("trainer: ReplayDiverged: version 1, trained again from the log, has weights")
    assert [s.version for s in run.steps()] == [0, 1]


def test_a_zombie_commits_nothing_and_exits_three(
    scene: Callable[..., Scene], capsys: pytest.CaptureFixture[str]
) -> None:
    run = scene(**FAR)
    run.seal_many(12)
    run.proxy.react = lambda name, body: (
        run.log().fence() if (name, body.get("version")) == ("update", 2) else None
    )
    assert run.train_here() == 3
    assert "trainer: Fenced:" in capsys.readouterr().err.splitlines()[-1]
    assert [s.version for s in run.steps()] == [0, 1, 2]
    assert run.proxy.names[-3:] == ["suspend", "update", "resume"]


def test_a_proxy_with_a_newer_fence_ends_it_too(scene: Callable[..., Scene]) -> None:
    run = scene(**FAR)
    run.seal_many(12)
    run.proxy.answers = {"suspend": [403]}
    assert run.train_here() == 3


def test_a_rollout_that_is_gone_is_named(
    scene: Callable[..., Scene], capsys: pytest.CaptureFixture[str]
) -> None:
    run = scene(deadlines={"batch": 0.5})
    assert run.train_here() == 4
    assert "trainer: BatchTimeout: no new group for" in capsys.readouterr().err.splitlines()[-1]


def test_a_gradient_that_is_not_finite_is_not_committed(
    scene: Callable[..., Scene], capsys: pytest.CaptureFixture[str]
) -> None:
    run = scene(**FAR, training={"advantage": "tests.training.test_main:huge"})
    run.seal_many(12)
    assert run.train_here() == 4
    assert "trainer: TrainingDiverged: the gradient's norm is" in capsys.readouterr().err.splitlines()[-1]
    assert [s.version for s in run.steps()] == [0]


def huge(rewards: list[float]) -> list[float]:
    """Finite, but not in single precision once summed."""
    return [3e38 for _ in rewards]


BEFORE = """
import os, signal
from infra.store.log import CommitLog
append = CommitLog.append_step
def die(self, **more):
    if self.ledger.next_version == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return append(self, **more)
CommitLog.append_step = die
"""
AFTER = """
import os, signal
from infra.training.swap import Engines
prefetch = Engines.prefetch
def die(self, version):
    if version == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return prefetch(self, version)
Engines.prefetch = die
"""


PUSHING = """
import os, signal
from infra.store.objects import ObjectStore
put, manifests = ObjectStore.put, []
def die(self, key, body):
    manifests.extend([key] if "/state/" in key and key.endswith("manifest.json") else [])
    if len(manifests) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return put(self, key, body)
ObjectStore.put = die
"""
AHEAD = """
import os, signal, threading
from infra.training.leader import Leader
from infra.training.publish import Checkpoints
push, next_batch = Checkpoints.push, Leader.next_batch
def hang(self, snapshot, *more):
    if snapshot.version == 3:
        threading.Event().wait(60)
    return push(self, snapshot, *more)
def die(self):
    batch = next_batch(self)
    if batch.version == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch
Checkpoints.push, Leader.next_batch = hang, die
"""
UPDATING = """
import os, signal
from infra.proxy.client import ControlClient
update = ControlClient.update
def die(self, version, oldest_viable):
    if version == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return update(self, version, oldest_viable)
ControlClient.update = die
"""
MOMENTS = {
    "without-its-manifest": (PUSHING, 2),
    "a-batch-ahead": (AHEAD, 2),
    "before-record": (BEFORE, 2),
    "after-record": (AFTER, 3),
    "engines-suspended": (UPDATING, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "left"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.full] * (name not in ("after-record", "engines-suspended")))
        for name, case in MOMENTS.items()
    ],
)
def test_a_kill_at_the_commit_loses_and_doubles_nothing(
    scene: Callable[..., Scene], moment: str, left: int
) -> None:
    """In the push of a state; with the next batch in hand; between push and record, record and prefetch; in a swap."""
    want = scene(**FAR, training={"checkpoint_every": 2})
    want.seal_many(12)
    assert want.train_here() == 0
    run = scene(**FAR, training={"checkpoint_every": 2})
    run.seal_many(12)
    code, errors = run.train(moment)
    assert code == -9, errors
    assert len(list(run.work.glob("trainer-*"))) == 1
    assert run.steps()[-1].version == left
    code, errors = run.train()
    assert code == 0, errors
    assert not list(run.work.glob("trainer-*"))
    assert hashes(run.steps()) == hashes(want.steps())
    assert [s.trained for s in run.steps()] == [s.trained for s in want.steps()]


@pytest.mark.slow
def test_two_processes_commit_as_one_and_end_together(scene: Callable[..., Scene]) -> None:
    run = scene(**FAR, training={"processes": 2, "steps": 4})
    run.seal_many(12)
    run.proxy.react = lambda name, body: (
        run.log().fence() if (name, body.get("version")) == ("update", 2) else None
    )
    code, errors = run.train()
    assert code == 3, errors
    assert [s.version for s in run.steps()] == [0, 1, 2]
    run.proxy.react = lambda name, body: None
    code, errors = run.train()
    assert code == 0, errors
    assert [s.version for s in run.steps()] == [0, 1, 2, 3, 4]
    assert [uid for s in run.steps() for uid in s.trained] == [f"{i}.0" for i in range(12)]
