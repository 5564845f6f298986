"""Stage step: the trainer, a child process of the compute-GPU worker.

Invariant: the trainer is a process of its own (one per data-parallel rank under `accelerate launch`), so that it
can die and be started again alone, frees its memory when it ends, and never shares torch state with the worker.
"""

from __future__ import annotations

from pathlib import Path

from rl.config.load import loads
from rl.placement import runs_on
from tasks.child import config_file, supervise


@runs_on("compute_gpu")
def train_process(run: str, config_json: str, proxy_url: str, work_dir: str) -> None:
    """Run the trainer until the run's steps are done. Raises Fenced, ProcessFailed, Crashed."""
    config = loads(config_json)
    module = ["infra.training.main", config_file(config_json, work_dir), "--proxy-url", proxy_url]
    supervise(run, module, Path(work_dir) / "logs" / "trainer.log", config.training.threads)
