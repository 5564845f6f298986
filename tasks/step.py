"""Stage step: the trainer, a child process of the compute-GPU worker.

Invariant: the trainer is a process of its own (one per data-parallel rank under `accelerate launch`), so that it
can die and be started again alone, frees its memory when it ends, and never shares torch state with the worker.
"""

from __future__ import annotations

from pathlib import Path

from infra.proxy.secret import CONTROL_KEY
from rl.config.load import loads, loads_as
from rl.config.tenants import ServiceConfig
from rl.placement import runs_on
from tasks.child import supervise


@runs_on("compute_gpu")
def train_process(run: str, config_file: str, proxy_url: str, key: str | None = None) -> None:
    """Run the trainer until the run's steps are done; `key` is that of the role `control`. Raises Fenced,
    ProcessFailed, Crashed."""
    path = Path(config_file)
    module = ["infra.training.main", config_file, "--proxy-url", proxy_url]
    threads = loads(path.read_text()).training.threads
    supervise(run, module, path.parent / "logs" / "trainer.log", threads, {} if key is None else {CONTROL_KEY: key})


@runs_on("compute_gpu")
def train_tenants(run: str, service_file: str, trainer: int, proxy_url: str, key: str) -> None:
    """Trainer number `trainer` of a service, until the service is no longer wanted; `key` is the service's of the role
    `control`. Raises ProcessFailed, Crashed (Unwanted at its end)."""
    path = Path(service_file)
    module = ["infra.training.tenants", service_file, "--trainer", str(trainer), "--proxy-url", proxy_url]
    threads = loads_as(ServiceConfig, path.read_text()).threads
    supervise(run, module, path.parent / "logs" / f"trainer-{trainer}.log", threads, {CONTROL_KEY: key})
