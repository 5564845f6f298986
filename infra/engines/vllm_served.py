"""What one vLLM server serves: its base, its adapters, and how one of them is replaced.

Invariants
- Files are verified before the server sees them. A replacement that fails before it began leaves everything as it was;
  one that fails in its middle leaves weights of two versions: Torn, after which nothing may be served.
- The server labels its base weights with a nonce of this object, so that tokens of a server that another object took
  over are known by their label; one that was restarted knows none of the names which are used here.
- The caller sees to it that nothing which belongs to the base is in flight while the base is replaced.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from infra.engines.errors import BadRequest, BaseFrozen, EngineClosed, UnknownPolicy, WeightMismatch
from infra.engines.protocol import BASE
from infra.engines.vllm_adapters import Adapter, AdapterTable
from infra.engines.vllm_facts import Facts
from infra.engines.vllm_files import BaseModel, warm
from infra.engines.vllm_http import ServerCalls
from rl.errors import GenerationFailure, RollmillError

LEAVE_S = 5.0

logger = logging.getLogger(__name__)


class Torn(RollmillError):
    """The server's weights are of two versions."""


class Served:
    """`staging` is where the server finds adapters and below whose parent it finds weights. The other parameters are
    `VLLMEngine`'s."""

    def __init__(
        self,
        calls: ServerCalls,
        model: BaseModel,
        staging: Path,
        max_adapters: int,
        max_rank: int,
        base_version: int | None,
    ):
        self.nonce = uuid.uuid4().hex[:12]
        self.swaps = 0
        self._calls, self._model, self._max_rank = calls, model, max_rank
        self._root = staging.resolve().parent
        self._adapters = AdapterTable(max_adapters, staging.resolve() / f"adapters-{self.nonce}")
        self._base_version, self._base_name = base_version, ""
        self._zero: Adapter | None = None
        self._needs_zero = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def take_over(self, facts: Facts) -> None:
        """Make the server this object's own. Raises BadRequest or NoAdapterSlot when it does not fit."""
        facts.check(self._adapters.slots, self._max_rank)
        self._base_name, self._needs_zero = facts.name, facts.cpu
        await self._calls.tell("/init_weight_transfer_engine", {"init_info": {"root": str(self._root)}})
        await self._calls.tell("/update_weight_version", {"new_version": self._label(self._base_version)})
        await self._calls.tell("/reset_prefix_cache?reset_running_requests=true")
        await self._calls.tell("/resume")

    def versions(self) -> dict[str, int]:
        """Current version by tenant."""
        base = {} if self._base_version is None else {BASE: self._base_version}
        return base | {tenant: adapter.version for tenant, adapter in self._adapters.current.items()}

    def held(self) -> Collection[str]:
        """Tenants of whose adapters there is anything."""
        return self._adapters.held()

    def pin(self, tenant: str) -> tuple[str, int, Callable[[], None]]:
        """The server's name for the tenant's policy, its version, and what to call when the request has ended.
        Raises UnknownPolicy."""
        if tenant == BASE:
            if self._base_version is None:
                served = ", ".join(repr(t) for t in self.versions()) or "none"
                raise UnknownPolicy(f"tenant {BASE!r} has no version loaded (served: {served})")
            return self._base_name if self._zero is None else self._zero.name, self._base_version, lambda: None
        adapter = self._adapters.hold(tenant)
        return adapter.name, adapter.version, lambda: self._release(adapter)

    # -- adapters ----------------------------------------------------------------------------------------------

    async def stage(self, tenant: str, version: int, directory: Path) -> Adapter:
        """Verify an adapter's files and put them where the server finds them. Raises WeightMismatch, NoAdapterSlot."""
        await asyncio.to_thread(self._model.check_adapter, directory, self._max_rank)
        return await asyncio.to_thread(self._adapters.stage, tenant, version, directory)

    async def publish(self, tenant: str, version: int, directory: Path) -> set[str]:
        """Make an adapter the tenant's policy; the tenants whose requests in flight have to change over, those of BASE
        too with the first adapter of all. Raises as `stage`."""
        adapter, concerned = await self.stage(tenant, version, directory), {tenant}
        try:
            if self._needs_zero and self._zero is None:
                await self._serve_zero(adapter)
                concerned.add(BASE)
            await self._load(adapter)
        except (BadRequest, GenerationFailure) as error:
            self._adapters.drop(tenant, version)
            if isinstance(error, EngineClosed):
                raise
            raise WeightMismatch(f"{directory}: {error}") from error
        before = self._adapters.switch(adapter)
        self.swaps += 1
        if before is not None and self._adapters.idle(before):
            self._retire(before)
        return concerned

    def withdraw(self, tenant: str) -> None:
        """Serve this tenant no more; its adapter goes with its last request."""
        adapter = self._adapters.withdraw(tenant)
        if adapter is not None and self._adapters.idle(adapter):
            self._retire(adapter)

    async def _serve_zero(self, like: Adapter) -> None:
        """From now on serve the base as an adapter that changes nothing: on a CPU vLLM computes rows without an adapter
        wrongly when there are rows with one beside them."""
        zero = await asyncio.to_thread(self._adapters.stage_zero, like)
        await self._load(zero)
        self._zero = zero

    async def _load(self, adapter: Adapter) -> None:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.directory)}
        await self._calls.tell("/v1/load_lora_adapter", body)

    def _release(self, adapter: Adapter) -> None:
        if self._adapters.release(adapter):
            self._retire(adapter)

    def _retire(self, adapter: Adapter) -> None:
        task = asyncio.ensure_future(self._unload(adapter))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _unload(self, adapter: Adapter) -> None:
        try:
            await self._calls.tell("/v1/unload_lora_adapter", {"lora_name": adapter.name})
        except RollmillError as error:
            logger.warning("adapter %s stays on the server: %s", adapter.name, error)
        await asyncio.to_thread(self._adapters.bury, adapter)

    # -- the base ----------------------------------------------------------------------------------------------

    async def prepare(self, directory: Path) -> None:
        """Verify a version of the base and bring its files near. Raises WeightMismatch, and BadRequest for a place
        where the server may not read."""
        if not directory.resolve().is_relative_to(self._root):
            raise BadRequest(f"weights in {directory}: the server reads only below {self._root}")
        await asyncio.to_thread(self._model.check_weights, directory)
        await asyncio.to_thread(warm, directory)

    def check_replaceable(self, version: int) -> None:
        """Raises BaseFrozen."""
        if self._adapters.current:
            tenants = ", ".join(sorted(self._adapters.current))
            raise BaseFrozen(f"the base can not become version {version}: adapters of {tenants} rest on it")

    async def replace(self, version: int, directory: Path) -> None:
        """Replace the base by what `prepare` saw; the server is paused afterwards. Raises Torn."""
        try:
            await self._calls.tell("/pause?mode=keep&clear_cache=false")
            await self._calls.tell("/start_weight_update")
            await self._calls.tell("/update_weights", {"update_info": {"path": str(directory.resolve())}})
            await self._calls.tell("/finish_weight_update", {"weight_version": self._label(version)})
            await self._calls.tell("/reset_prefix_cache?reset_running_requests=true")
        except RollmillError as error:
            raise Torn(f"replacing its weights by version {version} failed half-way: {error}") from error
        self._base_version = version
        self.swaps += 1

    def stranger(self, labels: set[str]) -> str | None:
        """A label that is not ours among those of the weights that made some tokens."""
        return min((label for label in labels if not label.startswith(self.nonce)), default=None)

    def _label(self, version: int | None) -> str:
        return f"{self.nonce}:{version}"

    async def close(self) -> None:
        """Take the adapters from the server, if it still answers, for whoever uses it next, and remove their files."""
        for task in list(self._tasks):
            task.cancel()
        mine = [*self._adapters.current.values(), *([] if self._zero is None else [self._zero])]
        self._zero = None
        self._adapters.current.clear()
        with suppress(RollmillError):
            for adapter in mine:
                await self._calls.tell("/v1/unload_lora_adapter", {"lora_name": adapter.name}, within_s=LEAVE_S)
        await asyncio.to_thread(self._adapters.close)
