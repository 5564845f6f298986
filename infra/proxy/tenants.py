"""The proxies of all jobs of a service, on one engine, behind one address: whose key it is decides whose proxy answers.

    a tenant's control, rollout or session key    its own proxy, which is that of a plain run (`app`), and nothing else
    the service's control or rollout key          /status /metrics, and with the former /control/engines
    none                                          /healthz

Which jobs there are is read in the job book: one that runs is served, any other one is not.

Invariants
- No key reaches another tenant's proxy: the choice is made by the key alone, before a path or a body is looked at.
- A job that can not be served (an adapter that does not fit, a log that can not be read) is told with its trouble, and
  leaves the others as they are.
- A key of a job that runs is never refused because the book was not read yet: any other one has it read anew. All that
  wait for that share one look, so that a stranger's keys, however many, cost one every AGAIN_S.
- No key is called unknown, and no job over, by a book that can not be read: that is answered as unavailable, which is
  worth another try. Who was served before that still is.
- What a job waits for that is paused or over is answered as unavailable: whoever asks for it is told to end elsewhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from infra.chat import ChatCodec
from infra.engines.protocol import Engine
from infra.proxy import registry
from infra.proxy.app import App, make_app
from infra.proxy.auth import CONTROL, OPEN, Guard, Keys, bearer, digest, refuse
from infra.proxy.control import Proxy
from infra.proxy.http import Failure, answer
from infra.proxy.tenant_metrics import TenantCollector
from infra.proxy.versions import VersionSource
from infra.proxy.wire import ServiceStatus, TenantStatus
from infra.store.jobs import JobBook
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from rl.config.run import RunConfig
from rl.config.tenants import ServiceConfig
from rl.errors import RollmillError
from rl.jobs import Entry, State

LOOK_S = 0.5
"""Between two looks into the job book."""
AGAIN_S = 0.2
"""From a look to the next one that unknown keys ask for."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class Tenant:
    """A job that is served."""

    config: RunConfig
    proxy: Proxy
    app: App
    cache: Path
    loading: asyncio.Task[None] | None = None
    """Brings the newest version to the engine, where that is not for the trainer to do."""
    trouble: str | None = None

    async def load(self) -> None:
        """Serve the head of the log, unless something is served. Never raises, for it hurts this job alone."""
        try:
            await self.proxy.load_head()
            self.trouble = None
        except Exception as error:
            self.trouble = f"{type(error).__name__}: {error}"
            logger.warning("%s: its newest version can not be served: %s", self.config.served_as, self.trouble)


class Tenants:
    """The ASGI application of a service. Lives on one event loop; `close` leaves the engine as it is.

    `pull` brings a version's files into a directory, see `VersionSource`."""

    def __init__(
        self,
        service: ServiceConfig,
        engine: Engine,
        keys: Keys,
        store: ObjectStore,
        cache_dir: Path,
        pull: Callable[[str, str, Path], Path],
        codec: Callable[[], ChatCodec],
    ):
        self.engine = engine
        self._service, self._keys, self._store, self._cache, self._pull = service, keys, store, cache_dir, pull
        self._codec = cache(codec)
        self._book = JobBook(store, service.name)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="job-book")
        self._tenants: dict[str, Tenant] = {}
        self._owners: dict[bytes, str] = {}
        """Job by the digest of each of its keys."""
        self._known: dict[str, Entry] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """Of jobs that are being taken from the engine."""
        self._looking, self._asking = asyncio.Lock(), asyncio.Lock()
        self._began = self._ended = -AGAIN_S
        """The last look into the book."""
        self._unread = False
        """Whether it failed."""
        self.registry = CollectorRegistry()
        """Of the service's metrics, which are those of all tenants and whatever is registered."""
        self.registry.register(TenantCollector(lambda: {n: t.proxy.metrics for n, t in self._tenants.items()}))
        self._operator = self._make_operator()

    # -- whose request -----------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        key = bearer(Request(scope).headers)
        if scope["path"] == OPEN or key is None or self._keys.role(key) is not None:
            await self._operator(scope, receive, send)
            return
        found = self._of(key)
        if not isinstance(found, Tenant):
            await self._look_again()
            found = self._of(key)
        if isinstance(found, Tenant):
            await found.app(scope, receive, send)
        else:
            await refuse(self._refusal(scope["path"], found), scope, receive, send)

    def _of(self, key: str) -> Tenant | Entry | None:
        """Whose key or token it is; the entry of a job that is not served."""
        owner = self._owners.get(digest(key))
        if owner is not None:
            return self._tenants.get(owner) or self._known[owner]
        return next((tenant for tenant in self._tenants.values() if tenant.app.knows(key)), None)

    def _refusal(self, path: str, entry: Entry | None) -> Failure:
        if self._unread:  # why is for the log: a stranger may be asking
            return Failure("unavailable", 503, f"{path}: whose key it is can not be looked up now; ask again")
        if entry is None:
            return Failure("unauthorized", 401, f"{path}: the key is that of no job here, or of a session that is over")
        said = f"job {entry.job.id} is {entry.state}, and not served"
        over = path.startswith(CONTROL) and entry.state is not State.RUNNING  # one that runs will be here
        return Failure("not_running", 409, said) if over else Failure("unavailable", 503, said)

    def _make_operator(self) -> Starlette:
        async def status(request: Request) -> Response:
            return answer(dataclasses.asdict(await self.status()))

        async def healthz(request: Request) -> Response:
            healthy = await self.engine.health()
            return answer({"healthy": healthy}, 200 if healthy else 503)

        async def metrics(request: Request) -> Response:
            return Response(generate_latest(self.registry), media_type="text/plain; version=0.0.4; charset=utf-8")

        routes = [Route("/status", status), Route("/healthz", healthz), Route("/metrics", metrics)]
        routes += registry.routes(self.engine, self._keys.control, self._service.deadlines)
        return Starlette(routes=routes, middleware=[Middleware(Guard, self._keys, lambda token: False)])

    async def status(self) -> ServiceStatus:
        found = {
            name: TenantStatus(
                t.proxy.serving, t.proxy.head, t.proxy.suspended, t.proxy.in_flight, t.trouble
            )
            for name, t in self._tenants.items()
        }  # fmt: skip
        return ServiceStatus(found, await self.engine.stats())

    # -- which jobs --------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Serve what the book says, until cancelled."""
        while True:
            try:
                await self.look()
            except RollmillError as error:
                logger.warning("the job book can not be read: %s", error)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Bring what is served to what the book says. Raises LogCorrupt or a StoreError when it can not be read."""
        async with self._looking:
            loop = asyncio.get_running_loop()
            began, unread = loop.time(), True
            try:
                await loop.run_in_executor(self._reader, self._book.sync)
                unread = False
                self._obey()
            finally:
                self._unread = unread
                self._began, self._ended = began, loop.time()

    def _obey(self) -> None:
        """Serve what runs and begin to take away what does not: nobody else waits for what is under way for that."""
        entries = {f"{e.job.tenant}.{e.job.name}": e for e in self._book.jobs.entries.values()}
        for name in entries.keys() - self._known.keys():
            mine = self._keys.of_tenant(name)
            self._owners |= {digest(mine.control): name, digest(mine.rollout): name}
        self._known = entries
        running = {f"{e.job.tenant}.{e.job.name}": e for e in self._book.jobs.running}
        for name in self._tenants.keys() - running.keys():
            leave = self._leave(name, self._tenants.pop(name))
            self._leaving[name] = asyncio.get_running_loop().create_task(leave)
        for name, entry in running.items():
            if name not in self._leaving:  # its withdrawal would be that of the new one
                self._serve(name, entry)

    async def _look_again(self) -> None:
        """Return after a look that began after the call: for a key of nobody that is served."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        async with self._asking:
            if self._began >= asked:
                return
            await asyncio.sleep(self._ended + AGAIN_S - loop.time())
            if self._began >= asked:  # `follow` was here
                return
            try:
                await self.look()
            except RollmillError as error:
                logger.warning("the job book can not be read: %s", error)

    def _serve(self, name: str, entry: Entry) -> None:
        try:
            if name not in self._tenants:
                self._tenants[name] = self._join(entry.job.run(self._service))
        except RollmillError as error:
            logger.warning("%s is not served: %s", name, error)
            return
        tenant = self._tenants[name]
        if tenant.proxy.serving is None and (tenant.loading is None or tenant.loading.done()):
            tenant.loading = asyncio.get_running_loop().create_task(tenant.load())

    def _join(self, config: RunConfig) -> Tenant:
        name = config.served_as
        log = CommitLog(self._store, config.prefix, f"proxy-{uuid.uuid4().hex[:8]}")
        own = self._cache / f"{name}-{uuid.uuid4().hex[:8]}"
        source = VersionSource(log, config.prefix, config.policy, own, self._pull)
        proxy = Proxy(config, self.engine, source, shared=True)
        return Tenant(config, proxy, make_app(proxy, self._keys.of_tenant(name), self._codec), own)

    async def _leave(self, name: str, tenant: Tenant) -> None:
        try:  # what is loading is not cancelled: cut off, it could reach an engine after the withdrawal
            await tenant.proxy.close()
        except RollmillError as error:
            logger.warning("%s could not be taken from the engine: %s", name, error)
        finally:
            del self._leaving[name]
        await asyncio.to_thread(shutil.rmtree, tenant.cache, ignore_errors=True)

    async def close(self) -> None:
        """Serve nobody any more."""
        for tenant in self._tenants.values():
            if tenant.loading is not None:
                tenant.loading.cancel()
            tenant.proxy.source.close()
        for leaving in self._leaving.values():
            leaving.cancel()
        self._tenants.clear()
        self._reader.shutdown(wait=False, cancel_futures=True)
