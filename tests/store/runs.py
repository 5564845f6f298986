"""A small run with real states and segments, to collect and to look at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory

from infra.store.audit import audit
from infra.store.buffer import SampleBuffer
from infra.store.directories import pull_directory, push_directory
from infra.store.errors import NotFound
from infra.store.gc import Collector
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.records import StateRef
from rl.retention import Retention
from rl.trajectory import Uid
from tests.store.samples import group


@dataclass
class Run:
    """A run with real states and segments; the version of a step trains one group of the version before."""

    store: ObjectStore
    prefix: str
    directory: Path
    full_every: int = 1
    alpha: int = 1
    model: Path | None = None
    """What a state's `model/` is; None makes one up."""

    def __post_init__(self) -> None:
        self.log = CommitLog(self.store, self.prefix, "trainer")
        self.buffer = SampleBuffer(self.store, self.prefix)
        self.log.fence()
        self.committed: dict[int, str] = {}

    def state(self, version: int, prefix: str | None = None) -> StateRef:
        files = self.directory / f"v{version}"
        if self.model is not None:
            copytree(self.model, files / "model")
        else:
            (files / "model").mkdir(parents=True, exist_ok=True)
            (files / "model" / "weights").write_bytes(b"w%d" % version)
        (files / "optimizer").write_bytes(b"o%d" % version)
        prefix = prefix or self.log.state_prefix()
        sha = push_directory(self.store, self.prefix + prefix, files)
        return StateRef(prefix=prefix, manifest_sha256=sha, full=version % self.full_every == 0)

    def steps(self, count: int) -> None:
        """Commit so many versions."""
        for _ in range(count):
            version, base = self.log.ledger.next_version, self.log.ledger.head
            trained: list[Uid] = []
            segments: list[str] = []
            if base is not None:
                ordinal = self.log.ledger.low_water
                trained = [Uid(ordinal, self.log.ledger.open_attempt(ordinal) or 0)]
                of = self.log.ledger.line[max(0, len(self.log.ledger.line) - 1 - self.alpha)]
                sealed = group(ordinal, trained[0].attempt, version=of)
                segments = [self.buffer.seal([sealed], f"g{ordinal:010d}", trained[0].attempt).key]
            state = self.state(version)
            self.log.append_step(state=state, weights_sha256="w", alpha=self.alpha, trained=trained, segments=segments)
            self.committed[version] = state.prefix

    def collector(
        self, newest: int, grace_s: float = 0.0, every: int | None = None, store: ObjectStore | None = None
    ) -> Collector:
        log = CommitLog(store or self.store, self.prefix, "collector")
        return Collector(log, self.prefix, Retention(newest, every=every), grace_s)

    def names(self) -> list[str]:
        return [key.removeprefix(self.prefix) for key in self.store.keys(self.prefix)]

    def states(self) -> list[int]:
        """The versions whose state is there."""
        there = set(self.names())
        return [version for version, prefix in self.committed.items() if f"{prefix}manifest.json" in there]

    def loads(self, ref: StateRef) -> bool:
        with TemporaryDirectory(dir=self.directory) as cache:
            try:
                pull_directory(self.store, self.prefix + ref.prefix, ref.manifest_sha256, Path(cache))
            except NotFound:
                return False
            return True

    def sound(self) -> bool:
        """Whether an audit, which reads every object that a record names, finds nothing wrong."""
        return not audit(self.store, self.prefix).findings

    def segments(self) -> list[int]:
        """The versions of the segments that are there."""
        return sorted({int(key.split("/")[1]) for key in self.names() if key.startswith("groups/")})
