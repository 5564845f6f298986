"""The engine that a run asks for, started on this machine.

Invariant: leaving the block ends all that it started.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.compute.scratch import scratch
from infra.engines.errors import EngineDidNotStart
from infra.engines.hf import HFEngine
from infra.engines.protocol import Engine
from infra.engines.vllm_config import vllm_engine, vllm_server
from infra.services.processes import free_port
from rl.config.engine import HFEngineSection, VLLMEngineSection
from rl.config.run import RunConfig


@dataclass(frozen=True, slots=True)
class Started:
    """An engine that can take work."""

    engine: Engine
    slots: int
    """Sequences decoded together."""
    capacity: int
    """Tokens whose keys and values have room."""


@asynccontextmanager
async def start_engine(
    config: RunConfig, hardware: str, base: Path, own: Path, stop: threading.Event
) -> AsyncIterator[Started]:
    """`base` is the model, `own` a directory of this engine alone, in the run's. It serves no version yet. Raises
    ModelUnusable, EngineNotInstalled, EngineDidNotStart."""
    if isinstance(config.engine, HFEngineSection):
        section = config.engine
        engine = await asyncio.to_thread(
            lambda: HFEngine(
                base,
                device=section.device,
                dtype=config.model.dtype,
                max_batch=section.max_batch,
                threads=section.threads,
                mixed_adapters=section.mixed_adapters,
            )
        )
        try:
            yield Started(engine, section.max_batch, engine.capacity)
        finally:
            await engine.close()
    else:
        async with _vllm(config, config.engine, hardware, base, own, stop) as started:
            yield started


@asynccontextmanager
async def _vllm(
    config: RunConfig, section: VLLMEngineSection, hardware: str, base: Path, own: Path, stop: threading.Event
) -> AsyncIterator[Started]:
    key, split, taken = secrets.token_urlsafe(32), section.disaggregation, set[int]()
    splits = split is not None and hardware in (split.prefill, split.decode)
    port, side_port = free_port(taken), free_port(taken) if splits else None
    server = vllm_server(config, section, base, own, port, key, side_port=side_port)
    staging = scratch(own.parent, f"{own.name.rpartition('-')[0]}-adapters")
    try:
        await asyncio.to_thread(server.start)
        if not await asyncio.to_thread(server.wait_ready, stop):
            raise EngineDidNotStart("vLLM was told to end before it was ready")
        # adapters and weights are read below the directory of the run, where the proxy has them, too
        with staging as directory:
            engine = vllm_engine(config, section, server.url, key, base, directory)
            try:
                await engine.start()
                yield Started(engine, section.max_batch, (await engine.stats())["kv_capacity"])
            finally:
                await engine.close()
    finally:
        await asyncio.to_thread(server.close)
