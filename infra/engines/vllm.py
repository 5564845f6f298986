"""Generation by a vLLM server, token by token and version by version.

    engine = VLLMEngine(server.url, key, model_dir=model_dir, staging=shared_dir, max_adapters=4, base_version=0)
    await engine.start()                    # on the loop of all later calls
    await engine.generate(...)              # and the rest of `protocol.Engine`
    kept = await prefill_engine.prefill(...); await decode_engine.generate(..., kv=kept)

`staging` is where the server finds adapters and below whose parent it finds weights, so it has to see the same files.

Invariants
- Every request to the server is made under one version, pinned before it is sent, and its tokens are recorded as they
  come. What goes on under another version is another request, that starts from the tokens so far: spans are exact.
- When the base is replaced nothing that belongs to it is in flight, and no cache of its keys and values survives.
- The server labels its weights with a nonce of this engine: tokens of a server that was restarted, or that another
  engine took over, end the request by name.
- A replacement that fails before it began leaves everything as it was; one that fails in its middle leaves weights of
  two versions, so the engine is done: `health` is false, every call raises EngineClosed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from infra.engines.errors import BadRequest, BaseFrozen, EngineClosed, PromptTooLong, UnknownPolicy, WeightMismatch
from infra.engines.protocol import BASE, Capabilities, Generation, Prefilled, Sampling
from infra.engines.vllm_adapters import Adapter, AdapterTable
from infra.engines.vllm_facts import Facts
from infra.engines.vllm_files import BaseModel, warm
from infra.engines.vllm_flight import Flight
from infra.engines.vllm_http import ServerCalls
from infra.engines.vllm_server import SERVED
from infra.engines.vllm_stats import counters
from infra.engines.vllm_wire import ABORT, GENERATE, Segment, abort, prefill, read_event, request
from rl.errors import DeadlineExceeded, GenerationFailure, RollmillError

CONTROL_S = 120.0
GRACE_S = 2.0
"""For the server to end a request that it was told to end; then the connection is closed."""
VAIN = 3
"""Requests in a row that the server may end unasked and without a token."""

logger = logging.getLogger(__name__)


class VLLMEngine:
    """One server, which is nobody else's.

    model_dir: the model that the server was started with. base_version: the version of its weights as the policy of
    tenant BASE; None serves BASE only after the first `update_weights`. max_adapters: tenants with an adapter that are
    served at once, of rank `max_rank` at most. control_s: deadline of every call but `generate`.

    Raises ModelUnusable for a directory that holds no model.
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        model_dir: Path,
        staging: Path,
        max_adapters: int = 0,
        max_rank: int = 16,
        base_version: int | None = None,
        control_s: float = CONTROL_S,
    ):
        self.capabilities = Capabilities(
            mixed_adapters=True, continues_across_update=True, deterministic=False, prefix_cache=True
        )
        self.max_length = 0
        """Tokens of one sequence, prompt included; known after `start`, as is the next."""
        self.kv_tokens = 0
        """Tokens of all sequences that the cache of keys and values holds at once."""
        self._calls = ServerCalls(url, key, control_s)
        self._model = BaseModel(model_dir)
        self._staging, self._max_rank = staging.resolve(), max_rank
        self._adapters = AdapterTable(max_adapters, self._staging / f"adapters-{uuid.uuid4().hex[:8]}")
        self._zero: Adapter | None = None
        self._needs_zero = False
        self._base_version, self._base_on_server = base_version, base_version
        self._nonce, self._serial = uuid.uuid4().hex[:12], 0
        self._flights: set[Flight] = set()
        self._running, self._base_ready = asyncio.Event(), asyncio.Event()
        self._running.set()
        self._base_ready.set()
        self._swap = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._random = random.SystemRandom()
        self._swaps = self._requests = 0
        self._over: str | None = None

    async def start(self) -> None:
        """Take the server over. Raises EngineClosed when it is not there, BadRequest when it was started otherwise
        than is needed here, NoAdapterSlot when it has too few."""
        self._calls.open()
        facts = Facts.of(await self._calls.json("GET", "/server_info?config_format=json"))
        facts.check(self._adapters.slots, self._max_rank)
        self.max_length, self.kv_tokens, self._needs_zero = facts.max_length, facts.kv_tokens, facts.cpu
        await self._calls.json("POST", "/init_weight_transfer_engine", {"init_info": {"root": str(self._root)}})
        await self._label()
        await self._calls.call("POST", "/reset_prefix_cache?reset_running_requests=true")
        await self._calls.call("POST", "/resume")

    # -- generation --------------------------------------------------------------------------------------------

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, tenant: str, request_id: str, kv: Prefilled | None = None
    ) -> Generation:
        """See the protocol; the caller bounds the wait. With `kv` of the same version the prompt is not computed here
        but fetched. Raises BadRequest too; EngineClosed carries what there was."""
        self._check(token_ids, sampling)
        flight = Flight(request_id, tenant, list(token_ids), sampling, self.max_length, kv)
        self._requests += 1
        self._flights.add(flight)
        try:
            while flight.finish is None:
                await self._go_on(flight)
        except EngineClosed as error:
            error.partial = flight.result("abort")
            raise
        finally:
            self._flights.discard(flight)
        return flight.result(flight.finish)

    async def prefill(self, token_ids: Sequence[int], sampling: Sampling, tenant: str, request_id: str) -> Prefilled:
        """Compute a prompt and keep its keys and values until another engine has fetched them (`generate(kv=...)`).
        Raises as `generate`."""
        self._check(token_ids, sampling)
        flight = Flight(request_id, tenant, list(token_ids), sampling, self.max_length, None)
        self._flights.add(flight)
        try:
            async with flight.stoppable():
                await self._may_start(tenant)
                model, version, release = self._pin(tenant)
                try:
                    body = prefill(model, self._wire_id(flight), token_ids, sampling)
                    answer = await self._calls.json("POST", GENERATE, body)
                finally:
                    release()
        except TimeoutError:
            raise GenerationFailure(f"the prefill of request {request_id} was interrupted") from None
        finally:
            self._flights.discard(flight)
        if not answer.get("kv_transfer_params"):
            raise BadRequest("the server gives no keys and values away; start it with a kv_role")
        return Prefilled(version, answer["kv_transfer_params"])

    async def _go_on(self, flight: Flight) -> None:
        """One request to the server, under one version."""
        segment, version = Segment(), None
        try:
            async with flight.stoppable():
                await self._may_start(flight.tenant)
                if flight.aborted:
                    return
                model, version, release = self._pin(flight.tenant)
                try:
                    kv = flight.fetchable(version)
                    sampling = flight.rest(self._random)
                    body = request(model, self._wire_id(flight), flight.tokens, sampling, kv)
                    async for line in self._calls.stream(GENERATE, body):
                        read_event(line, segment)
                finally:
                    flight.wire_id = None
                    release()
        except TimeoutError:
            segment.finish = "abort"
        except GenerationFailure as error:  # a server whose engine has died still says so itself
            if isinstance(error, EngineClosed) or await self.health():
                raise
            raise EngineClosed(str(error)) from error
        finally:
            if version is not None:
                flight.add(segment, version)
        self._judge(flight, segment)

    def _judge(self, flight: Flight, segment: Segment) -> None:
        """Whether the request has ended, and how."""
        strange = {label for label in segment.labels if not label.startswith(self._nonce)}
        if strange:
            self._over = f"its weights are labelled {min(strange)}: it was restarted, or another engine took it over"
            raise self._closed()
        if segment.finish is None:
            raise EngineClosed(f"vLLM at {self._calls.url} ended in the middle of an answer")
        if segment.finish == "abort" and not flight.stopped and not segment.token_ids:
            flight.vain += 1
            if flight.vain == VAIN:
                raise GenerationFailure(f"vLLM ended request {flight.request_id} unasked, {VAIN} times")
        flight.settle(segment.finish)

    async def _may_start(self, tenant: str) -> None:
        while not (self._running.is_set() and (tenant != BASE or self._base_ready.is_set())):
            await self._running.wait()
            if tenant == BASE:
                await self._base_ready.wait()
        if self._over is not None:
            raise self._closed()

    def _pin(self, tenant: str) -> tuple[str, int, Callable[[], None]]:
        """The server's name for the tenant's policy, its version, and what to call when the request has ended."""
        if tenant == BASE:
            if self._base_version is None:
                served = ", ".join(repr(t) for t in self.versions()) or "none"
                raise UnknownPolicy(f"tenant {BASE!r} has no version loaded (served: {served})")
            name = SERVED if self._zero is None else self._zero.name
            return name, self._base_version, lambda: None
        adapter = self._adapters.hold(tenant)
        return adapter.name, adapter.version, lambda: self._release(adapter)

    def _check(self, token_ids: Sequence[int], sampling: Sampling) -> None:
        if self._over is not None:
            raise self._closed()
        if len(token_ids) == 0:
            raise BadRequest("token_ids is empty; a prompt has one token at least")
        least, most = min(token_ids), max(token_ids)
        if least < 0 or most >= self._model.vocabulary:
            raise BadRequest(f"token_ids has {least}..{most}; the vocabulary is 0..{self._model.vocabulary - 1}")
        if sampling.max_new_tokens < 1:
            raise BadRequest(f"max_new_tokens is {sampling.max_new_tokens}; at least 1")
        if not sampling.temperature > 0:
            raise BadRequest(f"temperature is {sampling.temperature}; above 0")
        if len(token_ids) >= self.max_length:
            raise PromptTooLong(
                f"the prompt has {len(token_ids)} tokens; a sequence has {self.max_length} at most, answer included"
            )

    def _wire_id(self, flight: Flight) -> str:
        self._serial += 1
        flight.wire_id = f"{self._nonce}-{self._serial}"
        return flight.wire_id

    # -- control -----------------------------------------------------------------------------------------------

    async def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        """See the protocol. Raises EngineClosed, DeadlineExceeded."""
        self._running.clear()
        try:
            if mode == "abort":
                flights = list(self._flights)
                for flight in flights:
                    flight.aborted = True
                await self._interrupt(flights)
            await self._calls.call("POST", "/pause?mode=keep")
        except RollmillError:
            self._running.set()
            raise

    async def resume(self) -> None:
        """See the protocol. Raises EngineClosed, DeadlineExceeded."""
        if self._over is not None:
            raise self._closed()
        await self._calls.call("POST", "/resume")
        self._running.set()

    async def abort(self, request_ids: Collection[str]) -> None:
        flights = [flight for flight in self._flights if flight.request_id in request_ids]
        for flight in flights:
            flight.aborted = True
        await self._interrupt(flights)

    async def _interrupt(self, flights: Iterable[Flight]) -> None:
        """Have the present requests of these flights end; returns when they have."""
        chosen = list(flights)
        names = [flight.wire_id for flight in chosen if flight.wire_id is not None]
        ends = [flight.stop(GRACE_S if flight.wire_id is not None else 0.0) for flight in chosen]
        if names:
            await self._calls.call("POST", ABORT, abort(names))
        if ends:
            await asyncio.wait(ends, timeout=2 * GRACE_S)

    # -- versions ----------------------------------------------------------------------------------------------

    async def prefetch(self, tenant: str, version: int, directory: Path) -> None:
        """Verify the files and bring them near. Raises WeightMismatch, NoAdapterSlot, and BadRequest for weights that
        the server may not read."""
        if tenant != BASE:
            await self._stage(tenant, version, directory)
            return
        if not directory.resolve().is_relative_to(self._root):
            raise BadRequest(f"weights in {directory}: the server reads only below {self._root}")
        await asyncio.to_thread(self._model.check_weights, directory)
        await asyncio.to_thread(warm, directory)

    async def publish_adapter(self, tenant: str, version: int, directory: Path) -> None:
        """See the protocol; the served version again is a no-op. Raises as `prefetch`."""
        if tenant == BASE:
            raise BadRequest("an adapter needs a tenant of its own; the base is updated by update_weights")
        async with self._swap:
            if self.versions().get(tenant) == version:
                return
            adapter = await self._stage(tenant, version, directory)
            try:
                if self._needs_zero and self._zero is None:
                    await self._serve_zero(adapter)
                await self._load(adapter)
            except (BadRequest, GenerationFailure) as error:
                self._adapters.drop(tenant, version)
                if isinstance(error, EngineClosed):
                    raise
                raise WeightMismatch(f"{directory}: {error}") from error
            before = self._adapters.switch(adapter)
            self._swaps += 1
            await self._interrupt(flight for flight in self._flights if flight.tenant == tenant)
            if before is not None and self._adapters.idle(before):
                self._retire(before)

    async def update_weights(self, version: int, directory: Path) -> None:
        """See the protocol; the served version again is a no-op. Raises as `prefetch`, and BaseFrozen."""
        async with self._swap:
            if self._base_version == version:
                return
            if self._adapters.current:
                tenants = ", ".join(sorted(self._adapters.current))
                raise BaseFrozen(f"the base can not become version {version}: adapters of {tenants} rest on it")
            await self.prefetch(BASE, version, directory)
            self._base_ready.clear()
            try:
                await self._interrupt(flight for flight in self._flights if flight.tenant == BASE)
                await self._replace(version, directory)
            finally:
                self._base_ready.set()

    async def _replace(self, version: int, directory: Path) -> None:
        await self._calls.call("POST", "/pause?mode=keep")
        try:
            await self._calls.call("POST", "/start_weight_update")
            update = {"update_info": {"path": str(directory.resolve())}}
            await self._calls.json("POST", "/update_weights", update)
            await self._calls.json("POST", "/finish_weight_update", {"weight_version": self._labelled(version)})
            await self._calls.call("POST", "/reset_prefix_cache?reset_running_requests=true")
        except RollmillError as error:
            self._over = f"replacing its weights by version {version} failed half-way: {error}"
            raise self._closed() from error
        self._base_version = version
        self._swaps += 1
        if self._running.is_set():
            await self._calls.call("POST", "/resume")

    async def _stage(self, tenant: str, version: int, directory: Path) -> Adapter:
        await asyncio.to_thread(self._model.check_adapter, directory, self._max_rank)
        return await asyncio.to_thread(self._adapters.stage, tenant, version, directory)

    async def _serve_zero(self, like: Adapter) -> None:
        """From now on serve the base as an adapter that changes nothing: on a CPU vLLM computes rows without an adapter
        wrongly when there are rows with one beside them."""
        zero = await asyncio.to_thread(self._adapters.stage_zero, like)
        await self._load(zero)
        self._zero = zero
        await self._interrupt(flight for flight in self._flights if flight.tenant == BASE)

    async def _load(self, adapter: Adapter) -> None:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.directory)}
        await self._calls.json("POST", "/v1/load_lora_adapter", body)

    def _release(self, adapter: Adapter) -> None:
        if self._adapters.release(adapter):
            self._retire(adapter)

    def _retire(self, adapter: Adapter) -> None:
        task = asyncio.ensure_future(self._unload(adapter))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _unload(self, adapter: Adapter) -> None:
        try:
            await self._calls.json("POST", "/v1/unload_lora_adapter", {"lora_name": adapter.name})
        except RollmillError as error:
            logger.warning("adapter %s stays on the server: %s", adapter.name, error)
        await asyncio.to_thread(self._adapters.bury, adapter)

    def versions(self) -> dict[str, int]:
        base = {} if self._base_version is None else {BASE: self._base_version}
        return base | {tenant: adapter.version for tenant, adapter in self._adapters.current.items()}

    # -- life --------------------------------------------------------------------------------------------------

    async def health(self) -> bool:
        """Whether the server answers and nothing went wrong for good."""
        if self._over is not None:
            return False
        try:
            await self._calls.call("GET", "/health", within_s=10.0)
        except (GenerationFailure, DeadlineExceeded, BadRequest):
            return False
        return True

    async def stats(self) -> dict[str, Any]:
        """See `vllm_stats.counters`. Raises EngineClosed, DeadlineExceeded."""
        text = (await self._calls.call("GET", "/metrics")).decode()
        own = {"kv_tokens": self.kv_tokens, "requests": self._requests, "swaps": self._swaps}
        return counters(text) | own | {"paused": not self._running.is_set()}

    async def close(self) -> None:
        """End the requests in flight with EngineClosed; the server stays. Idempotent."""
        self._over = self._over or "it was closed"
        self._running.set()
        self._base_ready.set()
        for flight in list(self._flights):
            flight.stop(0.0)
        for task in list(self._tasks):
            task.cancel()
        await self._calls.close()
        await asyncio.to_thread(self._adapters.close)

    @property
    def _root(self) -> Path:
        return self._staging.parent

    def _labelled(self, version: int | None) -> str:
        return f"{self._nonce}:{version}"

    async def _label(self) -> None:
        await self._calls.json("POST", "/update_weight_version", {"new_version": self._labelled(self._base_version)})

    def _closed(self) -> EngineClosed:
        return EngineClosed(f"vLLM at {self._calls.url}: {self._over}")
