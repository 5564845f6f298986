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
- After what can not be mended here (a server that was restarted, weights of two versions) `health` is false and every
  call raises EngineClosed with the reason.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import orjson

from infra.engines.errors import BadRequest, EngineClosed, UnknownPolicy
from infra.engines.protocol import BASE, Capabilities, Generation, Prefilled, Sampling
from infra.engines.requests import check_request
from infra.engines.vllm_facts import Facts
from infra.engines.vllm_files import BaseModel
from infra.engines.vllm_flight import Flight
from infra.engines.vllm_flights import Flights
from infra.engines.vllm_http import ServerCalls
from infra.engines.vllm_served import Served, Torn
from infra.engines.vllm_stats import counters
from infra.engines.vllm_wire import GENERATE, Segment, prefill, read_event, request
from rl.errors import DeadlineExceeded, GenerationFailure, RollmillError

CONTROL_S = 120.0
HEALTH_S = 10.0
VAIN = 3
"""Requests in a row that the server may end unasked and without a token."""


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
        """Tokens of one sequence, prompt included; known after `start`."""
        self._calls = ServerCalls(url, key, control_s)
        self._model = BaseModel(model_dir)
        self._served = Served(self._calls, self._model, staging, max_adapters, max_rank, base_version)
        self._flights = Flights(self._calls, self._served.nonce)
        self._running, self._base_ready = asyncio.Event(), asyncio.Event()
        self._running.set()
        self._base_ready.set()
        self._swap = asyncio.Lock()
        self._random = random.SystemRandom()
        self._requests = 0
        self._over: str | None = None

    async def start(self) -> None:
        """Take the server over. Raises EngineClosed when it is not there, BadRequest when it was started otherwise
        than is needed here, NoAdapterSlot when it has too few."""
        self._calls.open()
        facts = Facts.of(orjson.loads(await self._calls.call("GET", "/server_info?config_format=json")))
        await self._served.take_over(facts)
        self.max_length = facts.max_length

    # -- generation --------------------------------------------------------------------------------------------

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, tenant: str, request_id: str, kv: Prefilled | None = None
    ) -> Generation:
        """See the protocol; the caller bounds the wait. With `kv` of the same version the prompt is not computed here
        but fetched. Raises BadRequest too; EngineClosed carries what there was."""
        self._check(token_ids, sampling)
        flight = Flight(request_id, tenant, list(token_ids), sampling, self.max_length, kv)
        self._requests += 1
        try:
            with self._flights.flying(flight):
                while flight.finish is None:
                    await self._go_on(flight)
        except EngineClosed as error:
            error.partial = flight.result("abort")
            raise
        return flight.result(flight.finish)

    def so_far(self, request_id: str) -> Generation | None:
        """What a request in flight has sampled until now; None for one that is not."""
        return self._flights.so_far(request_id)

    async def prefill(self, token_ids: Sequence[int], sampling: Sampling, tenant: str, request_id: str) -> Prefilled:
        """Compute a prompt and keep its keys and values until another engine has fetched them (`generate(kv=...)`).
        Raises as `generate`."""
        self._check(token_ids, sampling)
        flight = Flight(request_id, tenant, list(token_ids), sampling, self.max_length, None)
        answer: dict[str, Any] = {}
        with self._flights.flying(flight), suppress(TimeoutError):
            async with flight.stoppable():
                await self._may_start(tenant)
                model, version, release = self._served.pin(tenant)
                try:
                    body = prefill(model, self._flights.name(flight), token_ids, sampling)
                    answer = orjson.loads(await self._calls.call("POST", GENERATE, body))
                finally:
                    release()
        if flight.stopped:
            raise GenerationFailure(f"the prefill of request {request_id} was interrupted")
        if not answer.get("kv_transfer_params"):
            raise BadRequest("the server gives no keys and values away; start it with a kv_role")
        return Prefilled(version, answer["kv_transfer_params"])

    async def _go_on(self, flight: Flight) -> None:
        """One request to the server, under one version."""
        segment, version = Segment(), None
        flight.segment = segment
        try:
            async with flight.stoppable():
                await self._may_start(flight.tenant)
                model, version, release = self._served.pin(flight.tenant)
                flight.version = version
                try:
                    sampling, kv = flight.rest(self._random), flight.fetchable(version)
                    body = request(model, self._flights.name(flight), flight.tokens, sampling, kv)
                    async for line in self._calls.stream(GENERATE, body):
                        read_event(line, segment)
                finally:
                    flight.wire_id = None
                    release()
        except TimeoutError:
            segment.finish = "abort"
        except UnknownPolicy:
            if version is None:
                raise
            self._over = "it does not know what it was told to serve: it was restarted"
            raise self._closed() from None
        except GenerationFailure as error:  # a server whose engine has died still says so itself
            if isinstance(error, EngineClosed) or await self.health():
                raise
            raise EngineClosed(str(error)) from error
        finally:
            strange = self._served.stranger(segment.labels)
            if version is not None and strange is None:
                flight.add(segment, version)
        if strange is not None:
            self._over = f"its weights are labelled {strange}: another engine took it over"
            raise self._closed()
        self._judge(flight, segment)

    def _judge(self, flight: Flight, segment: Segment) -> None:
        """Whether the request has ended, and how."""
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

    def _check(self, token_ids: Sequence[int], sampling: Sampling) -> None:
        if self._over is not None:
            raise self._closed()
        check_request(token_ids, sampling, self._model.vocabulary, self.max_length)

    # -- control -----------------------------------------------------------------------------------------------

    async def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        """See the protocol. Raises EngineClosed, DeadlineExceeded."""
        self._running.clear()
        try:
            if mode == "abort":
                await self._flights.abort(lambda flight: True)
            await self._calls.tell("/pause?mode=keep&clear_cache=false")
        except RollmillError:
            self._running.set()
            raise

    async def resume(self) -> None:
        """See the protocol. Raises EngineClosed, DeadlineExceeded."""
        if self._over is not None:
            raise self._closed()
        await self._calls.tell("/resume")
        self._running.set()

    async def abort(self, request_ids: Collection[str]) -> None:
        """See the protocol. Raises EngineClosed, DeadlineExceeded."""
        wanted = frozenset(request_ids)
        await self._flights.abort(lambda flight: flight.request_id in wanted)

    # -- versions ----------------------------------------------------------------------------------------------

    async def prefetch(self, tenant: str, version: int, directory: Path) -> None:
        """Verify the files and bring them near. Raises WeightMismatch, NoAdapterSlot, and BadRequest for weights that
        the server may not read."""
        await (self._served.prepare(directory) if tenant == BASE else self._served.stage(tenant, version, directory))

    async def publish_adapter(self, tenant: str, version: int, directory: Path) -> None:
        """See the protocol; the served version again is a no-op. Raises as `prefetch`."""
        if tenant == BASE:
            raise BadRequest("an adapter needs a tenant of its own; the base is updated by update_weights")
        async with self._swap:
            if self.versions().get(tenant) != version:
                concerned = await self._served.publish(tenant, version, directory)
                await self._flights.interrupt(lambda flight: flight.tenant in concerned)

    async def withdraw_adapter(self, tenant: str) -> None:
        """See the protocol. Raises EngineClosed, DeadlineExceeded."""
        async with self._swap:
            await self._flights.abort(lambda flight: flight.tenant == tenant)
            self._served.withdraw(tenant)

    async def held(self) -> Collection[str]:
        return self._served.held()

    async def update_weights(self, version: int, directory: Path) -> None:
        """See the protocol; the served version again is a no-op. Raises as `prefetch`, and BaseFrozen."""
        async with self._swap:
            if self.versions().get(BASE) == version:
                return
            self._served.check_replaceable(version)
            await self._served.prepare(directory)
            self._base_ready.clear()
            try:
                await self._flights.interrupt(lambda flight: flight.tenant == BASE)
                await self._served.replace(version, directory)
                if self._running.is_set():
                    await self._calls.tell("/resume")
            except Torn as error:
                self._over = str(error)
                raise self._closed() from error
            finally:
                self._base_ready.set()

    def versions(self) -> dict[str, int]:
        return self._served.versions()

    # -- life --------------------------------------------------------------------------------------------------

    async def health(self) -> bool:
        """Whether the server answers and nothing went wrong for good."""
        if self._over is not None:
            return False
        try:
            await self._calls.call("GET", "/health", within_s=HEALTH_S)
        except (GenerationFailure, DeadlineExceeded, BadRequest):
            return False
        return True

    async def stats(self) -> dict[str, Any]:
        """Counters under the names of `vllm_stats.counters`, and requests, swaps, whether it is paused. Raises
        EngineClosed, DeadlineExceeded."""
        theirs = counters((await self._calls.call("GET", "/metrics")).decode())
        ours = {"requests": self._requests, "swaps": self._served.swaps}
        return theirs | ours | {"paused": not self._running.is_set()}

    async def close(self) -> None:
        """End the requests in flight with EngineClosed; the server stays. Idempotent."""
        self._over = self._over or "it was closed"
        self._running.set()
        self._base_ready.set()
        self._flights.cut()
        await self._served.close()
        await self._calls.close()

    def _closed(self) -> EngineClosed:
        return EngineClosed(f"vLLM at {self._calls.url}: {self._over}")
