"""Turns the configured source of the policy into a Hugging Face directory on disk.

Invariant: a cached directory is complete or absent, and its name says all that its content depends on, so
that processes can share a cache.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from infra.models.pretrained import check_pretrained
from infra.models.smollm2 import find_weights, write_smollm2
from rl.config.model import TINY_CONTEXT, ModelSection, PretrainedModel, ServiceModel, Smollm2Model, TinyModel
from rl.errors import ConfigError


def check_source(model: ModelSection) -> None:
    """Raise ConfigError where `materialise` would; reads no weight and writes nothing."""
    if isinstance(model.source, PretrainedModel):
        check_pretrained(model.source.path)
    elif isinstance(model.source, Smollm2Model):
        find_weights()


def longest_sequence(model: ModelSection) -> int | None:
    """Tokens of the longest sequence that the model takes, where its checked source tells. Raises ConfigError."""
    if isinstance(model.source, TinyModel):
        return TINY_CONTEXT
    if not isinstance(model.source, PretrainedModel):
        return None
    try:
        found = json.loads((Path(model.source.path).expanduser() / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.source.path: {model.source.path!r} has no readable config.json: {error}") from error
    positions = found.get("max_position_embeddings") if isinstance(found, dict) else None
    return positions if isinstance(positions, int) else None


def materialise(model: ModelSection, cache_dir: Path, seed: int) -> Path:
    """The directory of the initial model; made in `cache_dir` unless it is there or is the user's own."""
    source = model.source
    if isinstance(source, PretrainedModel):
        return check_pretrained(source.path)
    if isinstance(source, Smollm2Model):
        return _cached(cache_dir / f"smollm2-{model.dtype}", lambda into: write_smollm2(into, model.dtype))
    if isinstance(source, ServiceModel):
        raise ConfigError(f"model.source: service {source.name!r} keeps its base in the store; start the service first")
    from infra.models.tiny import write_tiny

    name = f"tiny-{source.size.hidden_size}x{source.size.layers}-seed{seed}"
    return _cached(cache_dir / name, lambda into: write_tiny(source.size, seed, into))


def _cached(directory: Path, write: Callable[[Path], None]) -> Path:
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
    try:
        write(scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory
