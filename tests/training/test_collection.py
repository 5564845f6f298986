"""A trainer that replays from a sparse checkpoint needs old samples: garbage collection leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.services.endpoints import S3Endpoint
from infra.store.audit import audit
from infra.store.gc import Collector
from infra.store.log import CommitLog
from rl.errors import RollmillError
from tests.training.scene import Scene
from tests.training.small import make_group

pytestmark = [pytest.mark.server, pytest.mark.slow]


def play(scene: Scene) -> None:
    """Seal what the engines make of every version that they are given, and no more."""
    alpha, served = scene.config.staleness.alpha, set[int]()

    def seal(version: int, first: int) -> None:
        scene.seal([make_group(first + i, 4, version=version) for i in range(3)])

    def roll(name: str, body: dict[str, Any]) -> None:
        if name == "update" and body["version"] not in served:
            served.add(body["version"])
            seal(body["version"], 3 * (body["version"] + alpha))

    if alpha:
        seal(0, 0)
    scene.proxy.react = roll


def collect(scene: Scene) -> None:
    config = scene.config
    Collector(CommitLog(scene.store, config.prefix, "gc"), config.prefix, config.keeps, 0.0).collect()


@pytest.mark.parametrize("alpha", [0, 1])
def test_a_replay_after_a_collection_is_bit_exact(
    s3: S3Endpoint, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alpha: int
) -> None:
    changes: dict[str, Any] = {
        "staleness": {"alpha": alpha},
        "training": {"steps": 7, "checkpoint_every": 3},
        "retention": {"newest": 1},
    }
    scenes = []
    for name in ("want", "run"):
        (work := tmp_path / name).mkdir()
        scenes.append(Scene(s3, base, work, **changes))
        play(scenes[-1])
    want, run = scenes
    assert want.train_here() == 0

    append = CommitLog.append_step

    def fail(self: CommitLog, **fields: Any) -> Any:
        if self.ledger.next_version == 6:
            raise RollmillError("told to")
        return append(self, **fields)

    monkeypatch.setattr(CommitLog, "append_step", fail)
    assert run.train_here() != 0 and run.log().ledger.head == 5
    monkeypatch.setattr(CommitLog, "append_step", append)

    collect(run)
    assert run.log().ledger.gc_floor == 3 - alpha, "the newest full checkpoint, and what its replay reads"
    left = {int(key.split("/")[3]) for key in run.store.keys(f"{run.config.prefix}groups/")}
    assert min(left) == 3 - alpha
    assert run.train_here() == 0
    assert [s.weights_sha256 for s in run.steps()] == [s.weights_sha256 for s in want.steps()]
    collect(run)
    assert run.log().ledger.gc_floor == 7 - alpha and not audit(run.store, run.config.prefix).findings
    for scene in scenes:
        scene.close()
