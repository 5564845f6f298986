"""Stage warmstart: the supervised warm start, as a child process of the compute-GPU worker.

Invariant: like the trainer it is a process of its own, ends with its run, and names its failure (exit code 4).
"""

from __future__ import annotations

from pathlib import Path

import typer

from infra.compute.lifeline import NAMED, die_with_parent, last_words
from rl.config.load import loads
from rl.errors import RollmillError
from rl.placement import runs_on
from tasks.child import supervise

THREADS = 1
"""Measured: a second one is no faster for a tiny model, and much slower where cores are shared."""


@runs_on("compute_gpu")
def warmstart_process(run: str, config_file: str, models_dir: str, out_dir: str) -> None:
    """Run the warm start as a process. Raises ProcessFailed, Crashed."""
    module = ["tasks.warmstart", config_file, models_dir, out_dir]
    supervise(run, module, Path(config_file).parent / "logs" / "warmstart.log", THREADS)


def main(config: Path, models_dir: Path, out_dir: Path) -> None:
    """Warm-start CONFIG's model, made or found in MODELS_DIR, by its environments' demonstrations, into OUT_DIR."""
    die_with_parent()
    from envs.registry import make_environment
    from infra.models.sources import materialise
    from infra.training.warmstart import warm_start

    try:
        settled = loads(config.read_text())
        base = materialise(settled.model, models_dir, settled.seed)
        warm_start(settled, make_environment, base, out_dir, lambda look: print(look, flush=True))
    except RollmillError as error:
        last_words("warmstart", error)
        raise SystemExit(NAMED) from None


if __name__ == "__main__":
    typer.run(main)
