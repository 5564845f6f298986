"""A vLLM server's metrics under the names of `Engine.stats`. Without I/O."""

from __future__ import annotations

import re
from typing import Any

from infra.engines.vllm_wire import metrics

_NAMES = {
    "tokens_generated": "generation_tokens_total",
    "tokens_reused": "prefix_cache_hits_total",
    "preempted": "num_preemptions_total",
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
}


def counters(text: str) -> dict[str, Any]:
    """From the server's Prometheus text: tokens generated, prefilled and reused from a prefix and requests preempted
    since its start; requests running and waiting now; `kv_usage`, the share of the cache of keys and values in use, and
    `kv_capacity`, the tokens that it has room for."""
    found = metrics(text)
    values: dict[str, Any] = {ours: int(found.get(theirs, 0.0)) for ours, theirs in _NAMES.items()}
    asked = int(found.get("prompt_tokens_total", 0.0))
    fetched = int(found.get("external_prefix_cache_hits_total", 0.0))  # from another server
    return values | {
        "tokens_prefilled": max(0, asked - values["tokens_reused"] - fetched),
        "kv_usage": found.get("kv_cache_usage_perc", 0.0),
        "kv_capacity": _capacity(text),
    }


def _capacity(text: str) -> int:
    """Tokens; vLLM tells it as a label."""
    tokens = re.search(r'kv_cache_size_tokens="(\d+)"', text)
    if tokens is not None:
        return int(tokens[1])
    blocks, size = re.search(r'num_gpu_blocks="(\d+)"', text), re.search(r'\bblock_size="(\d+)"', text)
    return int(blocks[1]) * int(size[1]) if blocks is not None and size is not None else 0
