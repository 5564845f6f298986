"""One generation in flight: what it has, what it lacks, and how it is made to stop.

    waiting for a version -> a request to the server -> stopped (a new version) -> waiting ... -> finish

Invariant: tokens, log-probs and spans only grow, and only by whole segments that were made under one version.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any, Literal

from infra.engines.protocol import Generation, Prefilled, Sampling
from infra.engines.vllm_wire import Segment

_ODD = 0x9E3779B97F4A7C15
_SEED_BITS = 2**63 - 1

Finish = Literal["stop", "length", "abort"]


class Flight:
    """`longest`: tokens of a whole sequence."""

    def __init__(
        self,
        request_id: str,
        tenant: str,
        prompt: list[int],
        sampling: Sampling,
        longest: int,
        kv: Prefilled | None,
    ):
        self.request_id, self.tenant = request_id, tenant
        self.tokens = prompt
        """Prompt and what was sampled so far."""
        self.finish: Finish | None = None
        self.aborted = False
        self.stopped = False
        """The present segment was told to end."""
        self.wire_id: str | None = None
        """The server's name of the present segment; None while there is none."""
        self.segment: Segment | None = None
        """What the present request to the server brought, under `version`."""
        self.version = 0
        self.vain = 0
        self._sampling, self._kv = sampling, kv
        self._prompt = len(prompt)
        self._limit = min(self._prompt + sampling.max_new_tokens, longest)
        self._logprobs: list[float] = []
        self._spans: list[tuple[int, int]] = []
        self._timeout: asyncio.Timeout | None = None
        self._ended: asyncio.Future[None] | None = None

    @asynccontextmanager
    async def stoppable(self) -> AsyncIterator[None]:
        """The time of one segment. `stop` ends it by TimeoutError, if it does not end by itself."""
        self.stopped = False
        self._ended = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(None) as self._timeout:
                yield
        finally:
            self._timeout = None
            self._ended.set_result(None)

    def stop(self, grace_s: float) -> asyncio.Future[None]:
        """Let the present segment end within `grace_s`; the result is done when it has."""
        self.stopped = True
        loop = asyncio.get_running_loop()
        if self._ended is None or self._timeout is None:
            done: asyncio.Future[None] = loop.create_future()
            done.set_result(None)
            return done
        if not self._timeout.expired():
            self._timeout.reschedule(loop.time() + grace_s)
        return self._ended

    def rest(self, source: Random) -> Sampling:
        """How to sample what is still lacking. A seed is not used twice, nor is a sequence of a server's own."""
        seed, made = self._sampling.seed, len(self._logprobs)
        seed = source.getrandbits(63) if seed is None else (seed + made * _ODD) & _SEED_BITS
        return replace(self._sampling, max_new_tokens=self._limit - len(self.tokens), seed=seed)

    def fetchable(self, version: int) -> dict[str, Any] | None:
        """What to fetch the prompt's keys and values by: once, and under the version that made them."""
        kv, self._kv = self._kv, None
        return kv.params if kv is not None and kv.version == version and not self._logprobs else None

    def add(self, segment: Segment, version: int) -> None:
        if segment.token_ids and (not self._spans or self._spans[-1][1] != version):
            self._spans.append((len(self._logprobs), version))
        self.tokens += segment.token_ids
        self._logprobs += segment.logprobs
        self.segment = None

    def settle(self, finish: str) -> None:
        """A segment ended; say whether the generation has."""
        made = self.tokens[self._prompt :]
        if made and made[-1] in self._sampling.stop_token_ids:
            self.finish = "stop"
        elif len(self.tokens) >= self._limit:
            self.finish = "length"
        elif self.aborted:
            self.finish = "abort"
        elif finish == "length":  # a server with less room than it said
            self.finish = "length"

    def result(self, finish: Finish) -> Generation:
        return Generation(self.tokens[self._prompt :], self._logprobs, finish, self._spans)

    def so_far(self) -> Generation:
        """What it has, as a copy."""
        tokens, logprobs, spans = self.tokens[self._prompt :], list(self._logprobs), list(self._spans)
        if self.segment is not None and self.segment.token_ids:
            if not spans or spans[-1][1] != self.version:
                spans.append((len(logprobs), self.version))
            tokens += self.segment.token_ids
            logprobs += self.segment.logprobs
        return Generation(tokens, logprobs, "abort", spans)
