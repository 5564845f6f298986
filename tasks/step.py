"""Stage step: the trainer, a child process of the compute-GPU worker.

Invariants
- The trainer is a process of its own (one per data-parallel rank under `accelerate launch`), so that it can die
  and be started again alone, frees its memory when it ends, and never shares torch state with the worker.
- It ends with its run and with its worker.
- Its exit code tells what happened: 0 done, 3 fenced by another trainer, 4 a named error, else it crashed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Event

from distributed import get_worker

from infra.compute.lifeline import spawn, stop, tail
from infra.compute.signals import follow
from rl.config.load import loads
from rl.errors import Fenced, RollmillError
from rl.placement import runs_on

FENCED, NAMED = 3, 4
PERIOD_S = 0.2


class ProcessFailed(RollmillError):
    """A child process ended with a failure; the message carries the end of its log."""


class Crashed(ProcessFailed):
    """It ended without naming a reason (killed, out of memory): worth another start."""


@runs_on("compute_gpu")
def train_process(run: str, config_json: str, proxy_url: str, work_dir: str) -> None:
    """Run the trainer until the run's steps are done. Raises Fenced, ProcessFailed, Crashed."""
    config = loads(config_json)
    module = ["infra.training.main", _config_file(config_json, work_dir), "--proxy-url", proxy_url]
    if config.training.processes > 1:
        module = ["accelerate.commands.launch", *_launch_arguments(config.training.processes), *module]
    _supervise(run, module, Path(work_dir) / "logs" / "trainer.log", config.training.threads)


@runs_on("compute_gpu")
def warmstart_process(run: str, config_json: str, model_dir: str, out_dir: str, work_dir: str) -> None:
    """Run the supervised warm start as a process. Raises ProcessFailed, Crashed."""
    module = ["infra.training.warmstart", _config_file(config_json, work_dir), model_dir, out_dir]
    _supervise(run, module, Path(work_dir) / "logs" / "warmstart.log", threads=2)


def _supervise(run: str, module: Sequence[str], log: Path, threads: int) -> None:
    ended = Event()
    with follow(run, ended, get_worker().scheduler.address):
        child = spawn(module, log, {"OMP_NUM_THREADS": str(threads)})
        try:
            while child.poll() is None and not ended.wait(PERIOD_S):
                pass
        finally:
            told_to_stop = child.poll() is None
            code = stop(child)
    if code == 0 or told_to_stop:
        return
    if code == FENCED:
        raise Fenced(tail(log, 1))
    if code == NAMED:
        raise ProcessFailed(tail(log, 1))
    raise Crashed(f"{module[0]} ended with code {code}; the end of {log}:\n{tail(log)}")


def _config_file(config_json: str, work_dir: str) -> str:
    path = Path(work_dir) / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(config_json)
    return str(path)


def _launch_arguments(processes: int) -> list[str]:
    return [
        "--num_processes",
        str(processes),
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--main_process_port",
        "0",
        *_device_arguments(),
        "-m",
    ]


def _device_arguments() -> list[str]:
    from torch.cuda import is_available

    return ["--multi_gpu"] if is_available() else ["--cpu"]
