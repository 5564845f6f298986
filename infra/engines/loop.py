"""The token loop of the embedded engine: continuous batching in one thread.

    commands (pause, swap, abort, submit) -> admit -> prefill what is not cached -> decode one token per row

Invariants
- Only this thread touches the module, the cache and the rows; others post commands, which run between two tokens.
- A row's version is read at the moment its token is sampled.
- If the loop dies, every request and every command, present and later, gets EngineClosed with the cause.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from math import isfinite
from typing import Any, Literal, TypeVar

import torch

from infra.engines.adapters import AdapterBank
from infra.engines.errors import EngineClosed, NonFiniteLogits, UnknownPolicy
from infra.engines.forward import Forward
from infra.engines.protocol import Generation
from infra.engines.slots import Row, Slots

T = TypeVar("T")

logger = logging.getLogger(__name__)


class TokenLoop:
    """`start` it once; talk to it by `submit` and `call` from any thread."""

    def __init__(self, module: torch.nn.Module, slots: Slots, bank: AdapterBank, threads: int, mixed: bool = True):
        self.versions: dict[str, int] = {}
        self.counters = dict.fromkeys(
            ("requests", "tokens_generated", "tokens_prefilled", "tokens_reused", "preempted", "swaps"), 0
        )
        self.busy_s = 0.0
        self.paused = False
        self.slots, self.bank = slots, bank
        self.waiting: deque[Row] = deque()
        self._unanswered: set[Row] = set()
        self._forward, self._threads, self._mixed = Forward(module, slots.cache, bank), threads, mixed
        self._posted: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._closed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    # -- from other threads ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._closed is None and self._thread.is_alive()

    def call(self, command: Callable[[], T]) -> Future[T]:
        """Run a command between two tokens. The future can not be cancelled; it always ends."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        with self._wake:
            if self._closed is not None:
                future.set_exception(self._closed_error())
            else:
                self._posted.append((command, future))
                self._wake.notify()
        return future

    def submit(self, row: Row) -> None:
        """Queue a request; its future always ends."""

        def admit() -> None:
            if row.tenant not in self.versions:
                served = ", ".join(repr(t) for t in self.versions) or "none"
                row.future.set_exception(
                    UnknownPolicy(f"tenant {row.tenant!r} has no version loaded (served: {served})")
                )
                return
            self.counters["requests"] += 1
            self.waiting.append(row)
            self._unanswered.add(row)

        def failed(posted: Future[None]) -> None:
            if (error := posted.exception()) is not None:
                row.future.set_exception(error)

        self.call(admit).add_done_callback(failed)

    def close(self) -> None:
        """End the loop; what is in flight gets EngineClosed. Idempotent."""

        def stop() -> None:
            raise EngineClosed("the engine was closed")

        self.call(stop)

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- commands, on the loop's thread ------------------------------------------------------------------------

    def pause(self, mode: Literal["keep", "abort"]) -> None:
        self.paused = True
        if mode == "abort":
            self.abort({row.request_id for row in (*self.waiting, *self.slots.running)})

    def resume(self) -> None:
        self.paused = False

    def abort(self, request_ids: Collection[str]) -> None:
        for row in [r for r in self.waiting if r.request_id in request_ids]:
            self.waiting.remove(row)
            self._answer(row, row.result("abort"))
        for row in [r for r in self.slots.running if r.request_id in request_ids]:
            self._finish(row, "abort")

    def switched(self, tenant: str, version: int) -> None:
        """The tenant's weights were just replaced."""
        self.versions[tenant] = version
        self.slots.forget(lambda owner: owner == tenant)
        self.counters["swaps"] += 1

    def withdrawn(self, tenant: str) -> None:
        """The tenant has no weights any more."""
        self.abort({row.request_id for row in (*self.waiting, *self.slots.running) if row.tenant == tenant})
        self.bank.remove(tenant)
        self.versions.pop(tenant, None)
        self.slots.forget(lambda owner: owner == tenant)

    # -- the loop ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._threads)
            with torch.inference_mode():
                while True:
                    self._obey()
                    if not self.paused and (self.waiting or self.slots.running):
                        started = time.perf_counter()
                        self._token()
                        self.busy_s += time.perf_counter() - started
        except BaseException as error:
            self._die(error)

    def _obey(self) -> None:
        """Run the posted commands; sleep until there is one when there is nothing else to do."""
        with self._wake:
            while not self._posted and (self.paused or not (self.waiting or self.slots.running)):
                self._wake.wait()
            posted, self._posted = self._posted, deque()
        while posted:
            command, future = posted.popleft()
            try:
                future.set_result(command())
            except EngineClosed as error:
                future.set_exception(error)
                self._posted.extendleft(reversed(posted))
                raise
            except Exception as error:
                future.set_exception(error)

    def _token(self) -> None:
        while self.slots.has_room() and (row := self._next()) is not None:
            self.counters["tokens_reused"] += self.slots.join(row)
            self.waiting.remove(row)
        longest = max(len(row.tokens) for row in self.slots.running)
        preempted = self.slots.reserve(longest)
        self.counters["preempted"] += len(preempted)
        self.waiting.extendleft(preempted)
        self.counters["tokens_prefilled"] += self._forward.prefill(self.slots.running)
        self._decode(self.slots.running)

    def _next(self) -> Row | None:
        """Which waiting row may join the batch: the first, or the first of the one tenant that is in it."""
        if self._mixed or not self.slots.running:
            return self.waiting[0] if self.waiting else None
        tenant = self.slots.running[0].tenant
        return next((row for row in self.waiting if row.tenant == tenant), None)

    def _decode(self, rows: list[Row]) -> None:
        """One more token for every row."""
        tokens, logprobs = self._forward.sample(rows)
        ended: list[tuple[Row, str]] = []
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            version = self.versions[row.tenant]
            if not row.spans or row.spans[-1][1] != version:
                row.spans.append((len(row.logprobs), version))
            row.cached = len(row.tokens)
            row.tokens.append(token)
            row.logprobs.append(min(logprob, 0.0))
            if not isfinite(logprob):
                ended.append((row, "broken"))
            elif token in row.stops:
                ended.append((row, "stop"))
            elif len(row.tokens) >= row.limit:
                ended.append((row, "length"))
        self.counters["tokens_generated"] += len(rows)
        for row, reason in ended:
            if reason == "broken":
                self._break(row)
            else:
                self._finish(row, reason)

    # -- ends --------------------------------------------------------------------------------------------------

    def _finish(self, row: Row, reason: str) -> None:
        result = row.result(reason)
        self.slots.leave(row)
        self._answer(row, result)

    def _break(self, row: Row) -> None:
        where = f"of tenant {row.tenant!r} at version {row.spans[-1][1]}"
        self.slots.leave(row, forget=True)
        self.slots.cache.clear(len(self.slots.running))
        self._answer(row, NonFiniteLogits(f"request {row.request_id}: logits {where} are not finite"))

    def _answer(self, row: Row, answer: Generation | Exception) -> None:
        self._unanswered.discard(row)
        if isinstance(answer, Exception):
            row.future.set_exception(answer)
        else:
            row.future.set_result(answer)

    def _closed_error(self) -> EngineClosed:
        if isinstance(self._closed, EngineClosed):
            return EngineClosed(str(self._closed))
        return EngineClosed(f"the engine's loop died: {type(self._closed).__name__}: {self._closed}")

    def _die(self, error: BaseException) -> None:
        if not isinstance(error, EngineClosed):
            logger.error("the engine's loop died", exc_info=error)
        with self._wake:
            self._closed = error
            posted, self._posted = self._posted, deque()
        for future in [row.future for row in self._unanswered] + [future for _, future in posted]:
            future.set_exception(self._closed_error())
        self._unanswered.clear()
        self.waiting.clear()
        self.slots.running.clear()
