"""Waiting for an engine to get on."""

from __future__ import annotations

import asyncio

from infra.engines.protocol import Engine


async def generated(engine: Engine) -> int:
    return (await engine.stats())["tokens_generated"]


async def until_generated(engine: Engine, more: int, since: int = 0) -> None:
    """Until `more` tokens were generated since the count was `since`."""
    async with asyncio.timeout(60):
        while await generated(engine) < since + more:
            await asyncio.sleep(0)
