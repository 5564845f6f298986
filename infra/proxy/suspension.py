"""Generation that is held, by an engine that pauses and by requests that wait.

    going on --begin--> held --end | watchdog--> going on

Invariants
- It ends within `within_s`, by `end` or by the watchdog. What the engine refuses the watchdog is tried again until it
  goes on.
- One that can not begin is undone; what was held before still is, and no longer than it was to be.
- The engine is told one thing at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from infra.engines.protocol import Engine
from infra.proxy.metrics import Metrics

AGAIN_S = 1.0
"""Between two tries to have the engine go on."""

logger = logging.getLogger(__name__)


class Suspension:
    """Lives on one event loop. Without an engine the requests alone are held."""

    def __init__(self, engine: Engine | None, within_s: float, metrics: Metrics):
        self._engine, self._within_s, self._metrics = engine, within_s, metrics
        self._open = asyncio.Event()
        self._open.set()
        self._since: float | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._telling = asyncio.Lock()

    @property
    def holds(self) -> bool:
        return self._since is not None

    async def over(self) -> None:
        """Wait while it holds."""
        await self._open.wait()

    async def begin(self) -> None:
        """Idempotent; each call gives the watchdog a new deadline. Raises what the engine raises."""
        async with self._telling:
            self._open.clear()
            try:
                if self._engine is not None:
                    await self._engine.pause("keep")
            except BaseException:
                if not self.holds:
                    self._open.set()
                    self._set_watchdog(self._go_on())  # part of a fleet may have paused
                raise
            if self._since is None:
                self._since = time.monotonic()
            self._set_watchdog(self._watch())

    async def end(self) -> None:
        """Idempotent. Raises what the engine raises; then the watchdog still watches."""
        watchdog = self._watchdog
        await self._resume()
        if watchdog is not None:
            watchdog.cancel()

    def close(self) -> None:
        """Hold nobody any more; the engine is left as it is."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._open.set()

    def _set_watchdog(self, work: Coroutine[Any, Any, None]) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._watchdog = asyncio.create_task(work)

    async def _watch(self) -> None:
        seconds = self._within_s
        await asyncio.sleep(seconds)
        logger.warning("suspended for %g s (deadlines.control) without a resume: the proxy goes on by itself", seconds)
        self._metrics.watchdog.inc()
        await self._go_on()

    async def _go_on(self) -> None:
        """Resume, however often that takes."""
        while True:
            try:
                await self._resume()
                return
            except Exception as error:
                logger.warning("the engine does not go on, and is told again: %s: %s", type(error).__name__, error)
            await asyncio.sleep(AGAIN_S)

    async def _resume(self) -> None:
        async with self._telling:
            if self._engine is not None:
                await self._engine.resume()
            self._open.set()
            if self._since is not None:
                self._metrics.suspended.inc(time.monotonic() - self._since)
                self._since = None
