"""Stage serve: the LLM proxy and the engines behind it, long tasks that hold slots of their classes.

    serve_engine    a GPU-tagged worker    proxy and engine in one, in the worker's process
    serve_proxy     a cpu worker           a proxy alone, as a process of its own
    host_engine     a GPU-tagged worker    one engine of a fleet, as a process of its own

Invariants: each ends with its run (`stop_signal`), also when the driver is gone; when its worker dies, Dask starts it
again elsewhere in the pool: a proxy on the same port, with the newest version that the log names; an engine reports to
its proxy and is brought there.
"""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from distributed import get_worker

from infra.compute.signals import follow
from infra.proxy.secret import CONTROL_KEY, ROLLOUT_KEY
from rl.config.load import loads, loads_as
from rl.config.tenants import ServiceConfig
from rl.placement import runs_on
from tasks.child import Crashed, Unwanted, supervise

if TYPE_CHECKING:
    from infra.proxy.auth import Keys


@runs_on("bandwidth_gpu")
def serve_engine(
    run: str, config_json: str, host: str, port: int, work_dir: str, keys: Keys, service_json: str | None = None
) -> None:
    """Serve until the run's stop signal, with files below `work_dir`: the run, or the jobs of a service. Raises the
    proxy's named errors (a port in use, a broken model)."""
    from infra.proxy.serve import serve  # brings torch, which no other process of a run's driver needs

    stop = Event()
    with follow(run, stop, get_worker().scheduler.address):
        service = None if service_json is None else loads_as(ServiceConfig, service_json)
        serve(loads(config_json), host, port, Path(work_dir), stop, keys, service)


@runs_on("cpu")
def serve_proxy(
    run: str, config_json: str, host: str, port: int, work_dir: str, keys: Keys, service_json: str | None = None
) -> None:
    """As `serve_engine`, for a proxy whose engines are elsewhere. Raises ProcessFailed, Crashed."""
    config = _write(Path(work_dir) / "proxy.json", config_json)
    module = ["infra.proxy.main", str(config), host, str(port), work_dir]
    if service_json is not None:
        module += ["--service", str(_write(Path(work_dir) / "service.json", service_json))]
    given = {CONTROL_KEY: keys.control, ROLLOUT_KEY: keys.rollout}
    supervise(run, module, Path(work_dir) / "logs" / "proxy.log", 1, given)


@runs_on({"default": "bandwidth_gpu"})
def host_engine(run: str, config_json: str, name: str, hardware: str, proxy_url: str, work_dir: str, key: str) -> None:
    """One engine, started again within `restarts.engine` when it dies or the proxy takes it out. Raises ProcessFailed
    (a broken model, vLLM that is not installed), Crashed once the budget is spent."""
    config = loads(config_json)
    host = get_worker().address.split("://")[1].rpartition(":")[0].strip("[]")
    file = _write(Path(work_dir) / f"{name}.json", config_json)
    module = ["infra.engines.process", str(file), name, hardware, proxy_url, host, work_dir]
    for left in range(config.restarts.engine, -1, -1):
        try:
            supervise(run, module, Path(work_dir) / "logs" / f"{name}.log", config.engine.threads, {CONTROL_KEY: key})
        except Unwanted:
            return
        except Crashed:
            if left == 0:
                raise


def _write(path: Path, config_json: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(config_json)
    return path
