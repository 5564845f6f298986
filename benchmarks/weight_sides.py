"""The sides of `benchmarks.weights`: a plain boto3 program, and a run that publishes versions of one model."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import timed
from infra.store.directories import PART_BYTES, WORKERS
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from infra.store.weights import WeightStore
from infra.training.batches import Batch
from infra.training.metrics import Clock
from infra.training.publish import Checkpoints, Publisher, Version
from infra.training.snapshot import Snapshots
from infra.training.swap import Engines
from rl.config.run import RunConfig
from rl.protocol import Phase, StepProtocol


class Raw:
    """Upload and download of a directory's files by a plain boto3 program."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client, self._bucket = client, bucket

    def push(self, prefix: str, directory: Path) -> None:
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        keys = {path: {"Bucket": self._bucket, "Key": prefix + path.name} for path in files}
        uploads = {path: self._client.create_multipart_upload(**keys[path])["UploadId"] for path in files}

        def send(piece: tuple[Path, int]) -> dict[str, Any]:
            path, start = piece
            with path.open("rb") as file:
                body = os.pread(file.fileno(), PART_BYTES, start)
            number = start // PART_BYTES + 1
            answer = self._client.upload_part(**keys[path], UploadId=uploads[path], PartNumber=number, Body=body)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        pieces = [(path, start) for path in files for start in range(0, path.stat().st_size, PART_BYTES)]
        with ThreadPoolExecutor(WORKERS) as pool:
            sent = list(pool.map(send, pieces))
        for path in files:
            parts = [part for (of, _), part in zip(pieces, sent, strict=True) if of == path]
            self._client.complete_multipart_upload(
                **keys[path], UploadId=uploads[path], MultipartUpload={"Parts": parts}
            )

    def pull(self, prefix: str, directory: Path, into: Path) -> None:
        into.mkdir()
        files = sorted(path for path in directory.rglob("*") if path.is_file())

        def fetch(piece: tuple[Path, int]) -> None:
            path, start = piece
            end = min(start + PART_BYTES, path.stat().st_size) - 1
            answer = self._client.get_object(Bucket=self._bucket, Key=prefix + path.name, Range=f"bytes={start}-{end}")
            with (into / path.name).open("r+b") as file:
                os.pwrite(file.fileno(), answer["Body"].read(), start)

        for path in files:
            (into / path.name).touch()
        with ThreadPoolExecutor(WORKERS) as pool:
            pieces = [(path, start) for path in files for start in range(0, path.stat().st_size, PART_BYTES)]
            list(pool.map(fetch, pieces))


class Absent:
    """Engines and tracker that are not there."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **more: None


class Side:
    """One run whose versions are all made of the same model."""

    def __init__(self, store: ObjectStore, model: torch.nn.Module, work: Path, alpha: int) -> None:
        self._beside = alpha > 0
        name = f"alpha{alpha}"
        config = RunConfig.model_validate(
            {
                "name": name,
                "domains": [{"name": "none", "environment": "none:None"}],
                "model": {"source": {"type": "pretrained", "path": "none"}},
                "staleness": {"alpha": alpha, "mode": "six_steps" if alpha else "sync_plus"},
                "store": {"bucket": store.bucket},
            }
        )
        (work / name / "base").mkdir(parents=True)
        self._model, self._snapshots = model, Snapshots()
        log = CommitLog(store, config.prefix, "trainer")
        log.fence()
        checkpoints = Checkpoints(config, WeightStore(store), work / name / "base", work / name)
        first = self._snapshots.take(0, model, full=False)
        ref = checkpoints.push(first, model, log.state_prefix())
        log.append_step(state=ref, weights_sha256=first.sha256, alpha=alpha)
        absent: Any = Absent()
        self.publisher = Publisher(config, log, checkpoints, Engines(absent, 10), absent, StepProtocol(alpha))
        self._version = 0

    def publish(self) -> float:
        """Seconds that the trainer's thread is held."""
        protocol, publisher = self.publisher.protocol, self.publisher
        if not self._beside:
            publisher.engines(Clock())
        protocol.enter(Phase.GET_BATCH)
        if self._beside:
            publisher.engines(Clock())
        protocol.enter(Phase.TRAIN)
        publisher.wait()  # what came before is not of this version
        self._version += 1
        batch = Batch(self._version - 1, self._version, [], [], [], [])
        figures = {"tokens": 1.0, "reward": 0.0, "lag_mean": 0.0}

        def submit() -> None:
            snapshot = self._snapshots.take(self._version, self._model, full=False)
            publisher.submit(Version(snapshot, self._model, batch, [], figures, Clock()))

        return timed(submit)
