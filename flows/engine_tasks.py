"""The tasks that serve a run: its proxy and its engines, on the workers of their classes.

Invariants: a proxy that died is started again within `restarts.engine`; an engine does so by itself (`tasks.serve`),
and past its budget it is given up: the run goes on with the others, and ends by name with the last one.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep

from distributed import Client, Future
from rich.console import Console

from infra.engines.errors import EngineClosed
from infra.proxy.auth import Keys
from rl.config.engine import VLLMEngineSection
from rl.config.load import dumps
from rl.config.run import RunConfig
from rl.config.tenants import ServiceConfig
from rl.errors import RollmillError
from rl.placement import HardwareClass
from tasks.child import Crashed
from tasks.serve import host_engine, serve_engine, serve_proxy

PERIOD_S = 0.1


class EngineTasks:
    """Of one session. `run` is the run's key on the cluster; `service` is that whose host the run is."""

    def __init__(
        self,
        client: Client,
        config: RunConfig,
        run: str,
        proxy_url: str,
        work_dir: Path,
        keys: Keys,
        console: Console,
        service: ServiceConfig | None = None,
    ):
        self._service = None if service is None else dumps(service)
        self._client, self._config, self._run, self._console = client, config, run, console
        self._url, self._work_dir, self._keys = proxy_url, work_dir, keys
        self._restarts = config.restarts.engine
        self._proxy: Future | None = None
        self._engines: dict[str, Future] = {}

    @property
    def start_s(self) -> float:
        """How long the first engine may take."""
        engine, seconds = self._config.engine, self._config.deadlines.start
        return seconds + engine.start if isinstance(engine, VLLMEngineSection) else seconds

    def start(self) -> None:
        """The proxy, and every engine that is not within it."""
        self._start_proxy()
        if self._config.engine.embedded:
            return
        for where, count in self._config.engine.counts.items():
            for index in range(count):
                name = f"{where.removesuffix('_gpu')}-{index}"
                self._engines[name] = self._submit(
                    name,
                    HardwareClass(where),
                    host_engine,
                    self._run,
                    dumps(self._config),
                    name,
                    where,
                    self._url,
                    str(self._work_dir),
                    self._keys.control,
                )

    def _start_proxy(self) -> None:
        engine = self._config.engine
        port = int(self._url.rsplit(":", 1)[1])
        host = self._config.pools.host
        arguments = (self._run, dumps(self._config), host, port, str(self._work_dir), self._keys, self._service)
        if engine.embedded:
            (where,) = engine.counts
            self._proxy = self._submit("serve", HardwareClass(where), serve_engine, *arguments)
        else:
            self._proxy = self._submit("proxy", HardwareClass.CPU, serve_proxy, *arguments)

    def _submit(self, name: str, where: HardwareClass, task, *arguments) -> Future:
        key = f"{name}-{uuid.uuid4().hex[:8]}"
        return self._client.submit(task, *arguments, resources={where.value: 1}, pure=False, key=key)

    def check(self) -> None:
        """Start again what may be. Raises RollmillError when that is no use."""
        if self._proxy is not None and self._proxy.done():
            self._restart_proxy(self._proxy.exception() or RollmillError("it ended before the run did"))
        for name, task in list(self._engines.items()):
            if task.done():
                cause = task.exception() or RollmillError("it ended before the run did")
                del self._engines[name]
                if not self._engines and not self._external:
                    raise RollmillError(f"engine {name}: {cause}")
                self._console.print(
                    f"engine {name} is given up ({cause}); the run goes on with {len(self._engines)} others",
                    highlight=False,
                )

    @property
    def _external(self) -> bool:
        engine = self._config.engine
        return isinstance(engine, VLLMEngineSection) and bool(engine.external)

    def _restart_proxy(self, cause: BaseException) -> None:
        named = isinstance(cause, RollmillError) and not isinstance(cause, EngineClosed | Crashed)
        if named or self._restarts == 0:
            raise RollmillError(f"engine: {cause}")
        self._restarts -= 1
        self._console.print(f"engine died ({cause}): started again, {self._restarts} restarts left", highlight=False)
        self._start_proxy()

    def wait(self, seconds: float) -> None:
        """For the end of all, after the run's stop was announced. What failed was told by `check`, or no longer
        matters."""
        tasks = [task for task in (self._proxy, *self._engines.values()) if task is not None]
        if not until_ended(tasks, seconds):
            self._console.print("an engine did not end in time; its lease ends it", highlight=False)


def until_ended(tasks: Sequence[Future], seconds: float) -> bool:
    """Wait for the end of all, however they end; whether they did in time."""
    end = monotonic() + seconds
    while not all(task.done() for task in tasks):
        if monotonic() > end:
            return False
        sleep(PERIOD_S)
    return True
