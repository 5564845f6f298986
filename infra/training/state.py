"""The state of a version as a directory, without pickle.

    model/                     Hugging Face model directory with the tokenizer's files, or PEFT adapter directory; a
                               model's safetensors are cut into files of the size that the configuration gives
    trainer/state.json         version, scheduler, learning rates
    trainer/optimizer.safetensors   AdamW moments, keyed by parameter name

Invariants
- `load_weights` and `load_trainer` after `save` give the same bits, and so does every step from there on: the
  generators are seeded anew for each step (`infra.training.setup.seed_step`).
- What is saved is the snapshot, also while the model is trained further.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from copy import copy
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import AutoModelForCausalLM, PreTrainedModel

from infra.training.snapshot import Snapshot, trained, unnamed
from rl.errors import RollmillError

FORMAT = 1
_OWN = ("config.json", "generation_config.json", "manifest.json")
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


class StateMismatch(RollmillError):
    """A stored state does not fit the model that it is loaded into."""


def save(snapshot: Snapshot, model: torch.nn.Module | None, base: Path, directory: Path, bucket_mb: int) -> None:
    """Write `model/` and, of a full snapshot, `trainer/`. Of a whole model `model` gives names and configuration, and
    `base` the tokenizer's files, which are copied, not written anew: tokens stay exact. An adapter needs neither."""
    if snapshot.adapter is not None:
        _save_adapter(snapshot.weights, snapshot.adapter, directory / "model")
    else:
        _save_model(snapshot, model, base, directory / "model", bucket_mb)
    if snapshot.full:
        _save_trainer(snapshot, directory / "trainer")


def _save_model(
    snapshot: Snapshot, model: torch.nn.Module | None, base: Path, directory: Path, bucket_mb: int
) -> None:
    assert isinstance(model, PreTrainedModel)
    directory.mkdir(parents=True, exist_ok=True)
    copies = {id(parameter): snapshot.weights[name] for name, parameter in trained(model)}
    live = model.state_dict(keep_vars=True)  # tied names share one parameter, and so one copy
    weights = {name: copies.get(id(tensor), tensor.detach()) for name, tensor in live.items()}
    model.save_pretrained(directory, state_dict=weights, max_shard_size=bucket_mb << 20)
    for file in companions(base):
        shutil.copyfile(file, directory / file.name)


def _save_adapter(weights: dict[str, torch.Tensor], adapter: LoraConfig, directory: Path) -> None:
    """As PEFT does, but of the copies alone: the model may hold other adapters by now."""
    # the base lies elsewhere in the store; a path of this machine would mean nothing there
    adapter = copy(adapter)
    adapter.base_model_name_or_path, adapter.inference_mode = None, True
    if isinstance(adapter.target_modules, set):
        adapter.target_modules = sorted(adapter.target_modules)  # the same file from every process
    adapter.save_pretrained(directory)
    bare = {unnamed(name): weight for name, weight in weights.items()}
    save_file(bare, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def companions(base: Path) -> Iterator[Path]:
    """What lies beside the weights of a model and is not made with them: the tokenizer's files."""
    for file in sorted(base.iterdir()):
        if file.is_file() and file.name not in _OWN and not file.name.endswith(_WEIGHTS):
            yield file


def load_weights(model: torch.nn.Module, directory: Path) -> None:
    """Read a `model/` directory into `model`, in place. Raises StateMismatch."""
    try:
        if isinstance(model, PeftModel):
            state = load_file(directory / "adapter_model.safetensors")
            held = model.active_adapter
            wanted = get_peft_model_state_dict(model, adapter_name=held, save_embedding_layers=False)
            if state.keys() != wanted.keys():
                raise ValueError(f"adapter weights differ in {sorted(state.keys() ^ wanted.keys())[:3]}")
            set_peft_model_state_dict(model, state, adapter_name=held)
        else:
            assert isinstance(model, PreTrainedModel)
            # through transformers, which knows how each architecture's file maps to its modules
            stored = AutoModelForCausalLM.from_pretrained(directory, dtype=model.dtype, local_files_only=True)
            model.load_state_dict(stored.state_dict())
    except (OSError, ValueError, RuntimeError) as error:
        raise StateMismatch(f"weights in {directory} do not fit the model: {error}") from error


def _save_trainer(snapshot: Snapshot, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    assert snapshot.moments is not None
    save_file(snapshot.moments, directory / "optimizer.safetensors")
    state = {"format": FORMAT, "version": snapshot.version, "scheduler": snapshot.scheduler}
    (directory / "state.json").write_text(json.dumps(state, sort_keys=True))


def load_trainer(
    directory: Path, version: int, model: torch.nn.Module, optimizer: Optimizer, scheduler: LRScheduler
) -> None:
    """Read a `trainer/` directory into freshly made optimizer and scheduler. Raises StateMismatch."""
    try:
        state = json.loads((directory / "state.json").read_text())
        moments = load_file(directory / "optimizer.safetensors")
    except (OSError, ValueError) as error:
        raise StateMismatch(f"trainer state in {directory} can not be read: {error}") from error
    if state["format"] != FORMAT or state["version"] != version:
        raise StateMismatch(
            f"trainer state in {directory} is of format {state['format']} and version {state['version']}, "
            f"not of format {FORMAT} and version {version}"
        )
    if state["scheduler"] is None:
        return
    parameters = dict(trained(model))
    for key, value in moments.items():
        name, _, slot = key.rpartition("|")
        if name not in parameters:
            raise StateMismatch(f"optimizer state in {directory} is for {name!r}, which is not trained here")
        parameter = parameters[name]
        # AdamW keeps its step counter on the CPU
        optimizer.state[parameter][slot] = value if slot == "step" else value.to(parameter.device)
    scheduler.load_state_dict({**scheduler.state_dict(), **state["scheduler"]})
    for group, rate in zip(optimizer.param_groups, state["scheduler"]["_last_lr"], strict=True):
        group["lr"] = rate
