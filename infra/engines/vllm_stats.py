"""A vLLM server's metrics under the names of `Engine.stats`. Without I/O."""

from __future__ import annotations

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
    since its start; requests running and waiting now; `kv_usage`, the share of the cache of keys and values in use."""
    found = metrics(text)
    values: dict[str, Any] = {ours: int(found.get(theirs, 0.0)) for ours, theirs in _NAMES.items()}
    asked = int(found.get("prompt_tokens_total", 0.0))
    return values | {
        "tokens_prefilled": max(0, asked - values["tokens_reused"]),
        "kv_usage": found.get("kv_cache_usage_perc", 0.0),
    }
