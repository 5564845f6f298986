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
from collections.abc import Sequence
from pathlib import Path

from infra.store.directories import Shelf, copy_directory, pull_directory, push_directory, read_manifest
from infra.store.errors import StoreError
from infra.store.mooncake import MooncakeShelf
from rl.config.infrastructure import MooncakeWeights, S3Weights

MODEL = ("model/*",)
"""What engines read of a version."""

log = logging.getLogger(__name__)


class WeightStore:
    """S3, and a faster shelf where the configuration names one."""

    def __init__(self, truth: Shelf, fast: Shelf | None = None) -> None:
        self._truth, self._fast = truth, fast

    @classmethod
    def open(cls, section: S3Weights | MooncakeWeights, truth: Shelf, lend: bool = False) -> WeightStore:
        """`lend`: this process gives its memory to a Mooncake Store. Raises MooncakeUnavailable."""
        if isinstance(section, S3Weights):
            return cls(truth)
        return cls(truth, MooncakeShelf(section, section.lend_mb << 20 if lend else 0))

    def push(self, key_prefix: str, directory: Path) -> str:
        """A version's directory, complete in S3 when this returns; the sha256 of its manifest. Raises StoreError."""
        sha = push_directory(self._truth, key_prefix, directory)
        if self._fast is not None:
            _, manifest = read_manifest(self._truth, key_prefix, sha)
            try:
                copy_directory(self._fast, key_prefix, manifest, directory, MODEL)
            except StoreError as error:
                log.warning("%s is in S3 only: %s", key_prefix, error)
        return sha

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
        if isinstance(self._fast, MooncakeShelf):
            self._fast.close()
