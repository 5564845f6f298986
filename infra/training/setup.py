"""Prepares a training process and loads the initial policy.

Invariants
- Nothing random outlives a step: `seed_step` makes every generator a function of (run seed, version, rank), so
  a resumed run needs no saved generator state to repeat bit by bit.
- torch runs its deterministic algorithms, for a replay must reproduce the hash of every step record.
- The model is always built from the run's `base/`, then a checkpoint is read into it: the reference of the KL
  term, which TRL takes from where the model was loaded, stays the initial policy.
- No telemetry, no network.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import transformers
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rl.config.base import Section
from rl.config.load import loads_as
from rl.errors import ConfigError, RollmillError
from rl.stream import derive_seed

# here and not by environment variables, which the hub's client reads when it is first imported, by whomever
constants.HF_HUB_OFFLINE = True
constants.HF_HUB_DISABLE_TELEMETRY = True

S = TypeVar("S", bound=Section)


class ModelUnreadable(RollmillError):
    """A model directory that transformers can not load."""


def read_config(kind: type[S], path: Path) -> S:
    """A resolved configuration that was written for this process. Raises ConfigError."""
    try:
        return loads_as(kind, path.read_text(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: can not be read: {error}") from error


def prepare_process(threads: int) -> None:
    """Threads and determinism of this process. Call before the first tensor."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    # warn_only: an operation without a deterministic form still runs, and a replay that it makes diverge is
    # caught by name.
    torch.use_deterministic_algorithms(True, warn_only=True)


def seed_step(seed: int, version: int, rank: int) -> None:
    """Reset every generator for the step that makes `version`."""
    value = derive_seed(seed, "step", version, rank) % 2**32
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def load_model(directory: Path, dtype: str) -> PreTrainedModel:
    """The causal language model in a Hugging Face directory, in `dtype` ("float32" or "bfloat16").

    Raises ModelUnreadable."""
    try:
        return AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype), local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ModelUnreadable(f"model directory {directory} can not be loaded: {error}") from error


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer; training needs of it the pad token only. Raises ModelUnreadable."""
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelUnreadable(f"tokenizer in {directory} can not be loaded: {error}") from error
