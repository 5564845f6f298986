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
from infra.engines.vllm import VLLMEngine
from infra.engines.vllm_server import VLLMServer
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
    lora, key = config.model.lora, secrets.token_urlsafe(32)
    adapters, rank = (0, 16) if lora is None else (section.max_adapters, lora.rank)
    split = section.disaggregation
    taken: set[int] = set()
    splits = split is not None and hardware in (split.prefill, split.decode)
    server = VLLMServer(
        base,
        home=own,
        port=free_port(taken),
        key=key,
        dtype=config.model.dtype,
        max_loras=adapters,
        max_lora_rank=rank,
        max_num_seqs=section.max_batch,
        gpu_memory_utilization=section.memory,
        cpu_cache_gib=section.cpu_cache_gb,
        max_model_len=section.max_length or config.rollout.max_tokens,
        # both, so that one alone can do without the other
        kv_role="kv_both" if splits else None,
        side_port=free_port(taken) if splits else None,
        extra_args=section.extra_args,
        ready_s=section.start,
        env={"OMP_NUM_THREADS": str(section.threads)} | section.environment,
    )
    staging = scratch(own.parent, f"{own.name.rpartition('-')[0]}-adapters")
    try:
        await asyncio.to_thread(server.start)
        if not await asyncio.to_thread(server.wait_ready, stop):
            raise EngineDidNotStart("vLLM was told to end before it was ready")
        # adapters and weights are read below the directory of the run, where the proxy has them, too
        with staging as directory:
            engine = VLLMEngine(
                server.url,
                key,
                model_dir=base,
                staging=directory,
                max_adapters=adapters,
                max_rank=rank,
                control_s=config.deadlines.control,
            )
            try:
                await engine.start()
                yield Started(engine, section.max_batch, (await engine.stats())["kv_capacity"])
            finally:
                await engine.close()
    finally:
        await asyncio.to_thread(server.close)
