"""The weight store: where a version's `model/` lies, for the trainer that publishes it and the engines that read it.

    trainer   push to S3 -> copy `model/` to the fast shelf, if there is one -> step record
    engine    step record -> the fast shelf, else S3 -> local copy

Invariants
- S3 is the truth: a version is complete there before a record names it, and a resume reads nothing else.
- The fast shelf only saves time: what fails there is told in the log and changes nothing. That it can be reached at
  all is checked at the start of a process, where a mistake in the configuration is an error by name.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from infra.store.directories import Shelf, copy_directory, pull_directory, push_directory, read_manifest
from infra.store.errors import StoreError
from infra.store.mooncake import MooncakeShelf
from rl.config.infrastructure import MooncakeWeights, S3Weights

MODEL = ("model/*",)
"""What engines read of a version."""

class Memory(Shelf, Protocol):
    """A fast shelf of small size."""

    def forget(self, key_prefix: str) -> None:
        """Give back the room of a directory. Raises StoreError."""

    def close(self) -> None:
        """Leave it, with what this process lent it."""


log = logging.getLogger(__name__)


class WeightStore:
    """S3, and a faster shelf where the configuration names one."""

    def __init__(self, truth: Shelf, fast: Memory | None = None) -> None:
        self._truth, self._fast = truth, fast
        self._copied: deque[str] = deque()

    @classmethod
    def open(cls, section: S3Weights | MooncakeWeights, truth: Shelf, lend: bool = False) -> WeightStore:
        """`lend`: this process gives its memory to a Mooncake Store. Raises MooncakeUnavailable."""
        if isinstance(section, S3Weights):
            return cls(truth)
        return cls(truth, MooncakeShelf(section, section.lend_mb << 20 if lend else 0))

    def beside(self) -> WeightStore:
        """The same shelves for another run: the fast one has room for the newest versions of each."""
        return WeightStore(self._truth, self._fast)

    def push(self, key_prefix: str, directory: Path) -> str:
        """A version's directory, complete in S3 when this returns; the sha256 of its manifest. Raises StoreError."""
        sha = push_directory(self._truth, key_prefix, directory)
        if self._fast is not None:
            try:
                self._copy(self._fast, key_prefix, sha, directory)
            except StoreError as error:
                log.warning("%s is in S3 only: %s", key_prefix, error)
        return sha

    def _copy(self, fast: Memory, key_prefix: str, sha: str, directory: Path) -> None:
        """The engines have the version before, when the next one is pushed: older ones make room."""
        while len(self._copied) > 1:
            fast.forget(self._copied[0])
            self._copied.popleft()
        self._copied.append(key_prefix)
        _, manifest = read_manifest(self._truth, key_prefix, sha)
        copy_directory(fast, key_prefix, manifest, directory, MODEL)

    def pull(self, key_prefix: str, manifest_sha256: str, into: Path, only: Sequence[str] = MODEL) -> Path:
        """A verified local copy (see `pull_directory`). Raises StoreError."""
        if self._fast is not None:
            try:
                return pull_directory(self._fast, key_prefix, manifest_sha256, into, only)
            except StoreError as error:
                log.warning("%s is read from S3: %s", key_prefix, error)
        return pull_directory(self._truth, key_prefix, manifest_sha256, into, only)

    def close(self) -> None:
        """Leave the fast shelf, with what this process lent it."""
        if self._fast is not None:
            self._fast.close()
