"""Stage serve: the LLM proxy with its embedded engine, a long task that holds a GPU-tagged slot.

Invariants: it ends with its run (`stop_signal`), also when the driver is gone; when its worker dies, Dask starts
it again elsewhere in the pool, on the same port, and it comes back with the newest version that the log names.
"""

from __future__ import annotations

from pathlib import Path
from threading import Event

from distributed import get_worker

from infra.compute.signals import follow
from rl.config.load import loads
from rl.placement import runs_on


@runs_on("bandwidth_gpu")
def serve_engine(run: str, config_json: str, host: str, port: int, work_dir: str) -> None:
    """Serve until the run's stop signal, with files below `work_dir`. Raises the proxy's named errors (a port in
    use, a broken model)."""
    from infra.proxy.serve import serve  # brings torch, which no other process of a run's driver needs

    stop = Event()
    with follow(run, stop, get_worker().scheduler.address):
        serve(loads(config_json), host, port, Path(work_dir), stop)
