"""A model directory that the user already has: checked, never altered.

Invariant: what is missing is a ConfigError that names the field, the path and the mend; no weight is read.
"""

from __future__ import annotations

from pathlib import Path

from infra.chat import ChatCodec
from rl.errors import ConfigError

FIELD = "model.source.path"


def check_pretrained(path: str) -> Path:
    """The directory, known to hold configuration, weights, tokenizer and a usable chat template."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise ConfigError(f"{FIELD}: {path!r} {what}; give a local directory saved with save_pretrained")
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{FIELD}: {path!r} has no config.json; save the model there with save_pretrained")
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"{FIELD}: {path!r} has no *.safetensors; save the model there with save_pretrained")
    try:
        ChatCodec.from_directory(directory)
    except ConfigError as error:
        raise ConfigError(f"{FIELD}: {error}") from error
    return directory
