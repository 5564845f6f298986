"""What a run's configuration asks of vLLM: the server, and the engine that talks to it. Without torch.

Invariant: a server and an engine that are made of one configuration fit each other, whoever starts the server.
"""

from __future__ import annotations

from pathlib import Path

from infra.engines.vllm import VLLMEngine
from infra.engines.vllm_server import VLLMServer
from infra.services.service import HOST
from rl.config.engine import VLLMEngineSection
from rl.config.run import RunConfig


def vllm_server(
    config: RunConfig,
    section: VLLMEngineSection,
    base: Path,
    home: Path,
    port: int,
    key: str,
    *,
    host: str = HOST,
    side_port: int | None = None,
) -> VLLMServer:
    """The server that the configuration asks for, not started: of `base`, with files in `home`. With `side_port` keys
    and values can come from and go to other servers."""
    lora = config.model.lora
    return VLLMServer(
        base,
        home=home,
        port=port,
        key=key,
        host=host,
        dtype=config.model.dtype,
        max_loras=0 if lora is None else section.max_adapters,
        max_lora_rank=16 if lora is None else lora.rank,
        max_num_seqs=section.max_batch,
        gpu_memory_utilization=section.memory,
        cpu_cache_gib=section.cpu_cache_gb,
        max_model_len=section.max_length or config.rollout.max_tokens,
        # both, so that one alone can do without the other
        kv_role=None if side_port is None else "kv_both",
        side_port=side_port,
        extra_args=section.extra_args,
        ready_s=section.start,
        env={"OMP_NUM_THREADS": str(section.threads)} | section.environment,
    )


def vllm_engine(
    config: RunConfig, section: VLLMEngineSection, url: str, key: str, base: Path, staging: Path
) -> VLLMEngine:
    """The engine of such a server, not started; `staging` as there."""
    lora = config.model.lora
    return VLLMEngine(
        url,
        key,
        model_dir=base,
        staging=staging,
        max_adapters=0 if lora is None else section.max_adapters,
        max_rank=16 if lora is None else lora.rank,
        control_s=config.deadlines.control,
    )
