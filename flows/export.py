"""`rollmill export`: a version as a directory for transformers, PEFT and vLLM.

Invariants: every file is verified; the directory appears whole, under its name, or not at all; nothing is written over.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.command import ConfigArgument, SetOption, console, fresh_directory, one_line_errors
from flows.versions import Run, run_of
from rl.errors import ConfigError

if TYPE_CHECKING:
    from rl.records import StateRef

ADAPTER = "adapter_config.json"


@one_line_errors
def export(
    config: ConfigArgument,
    to: Annotated[Path, typer.Option(help="A directory that does not exist yet, or is empty.")],
    version: Annotated[str, typer.Argument(help="Its number, `head`, or `base` (what an adapter goes with).")] = "head",
    merged: Annotated[
        bool, typer.Option("--merged", help="Of an adapter: the base with the adapter merged into it, a whole model.")
    ] = False,
    overrides: SetOption = [],  # noqa: B006
) -> None:
    """A version as a directory that transformers and vLLM load, or PEFT, if it is an adapter."""
    to = fresh_directory("--to", to)
    with run_of(config, overrides) as run:
        state = None if version == "base" else run.step(version).state
        with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}-") as scratch:
            found = _pulled(run, version, state, Path(scratch) / "version")
            if merged and (found / ADAPTER).exists():
                found = _merged(_pulled(run, "base", None, Path(scratch) / "base"), found, Path(scratch) / "merged")
            said = _loads(found, to)
            if to.exists():
                to.rmdir()
            shutil.move(found, to)
        console.print(f"{to}: {said}", highlight=False, soft_wrap=True)


def _pulled(run: Run, version: str, state: StateRef | None, cache: Path) -> Path:
    """The files of a version, or of the base. Raises ConfigError where they are gone, Corrupt."""
    from infra.store.directories import pull_directory
    from infra.store.errors import NotFound

    store, prefix = run.log.store, run.config.prefix
    try:
        if state is None:
            return pull_directory(store, run.config.base_prefix, None, cache)
        return pull_directory(store, prefix + state.prefix, state.manifest_sha256, cache, only=("model/*",)) / "model"
    except NotFound:
        raise ConfigError(
            f"VERSION {version}: its state was deleted (the gc floor is {run.log.ledger.gc_floor}); `rollmill versions "
            "list` shows what is there"
        ) from None


def _merged(base: Path, adapter: Path, to: Path) -> Path:
    """The base with the adapter in it, in the base's own precision. The log's versions are never merged ones."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from infra.training.state import companions

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", local_files_only=True)
    whole = PeftModel.from_pretrained(model, adapter).merge_and_unload(safe_merge=True)
    whole.save_pretrained(to)
    for path in companions(base):
        shutil.copyfile(path, to / path.name)
    return to


def _loads(found: Path, to: Path) -> str:
    """How to load what was exported."""
    if (found / ADAPTER).exists():
        return (
            f"an adapter: PeftModel.from_pretrained(base, {str(to)!r}), or vllm serve BASE --enable-lora "
            f"--lora-modules mine={to}; `export ... base` writes the base, `--merged` a whole model"
        )
    return f"a model: AutoModelForCausalLM.from_pretrained({str(to)!r}), or vllm serve {to}"
