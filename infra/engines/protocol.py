"""The one interface of every generation engine: asynchronous and token-level.

Invariants
- The history sent is the exact token ids; an engine never re-tokenises.
- Log-probs are natural logs of the sampled token's probability after temperature.
- `version_spans` covers the new tokens: each span starts at an index into `token_ids` and names the policy
  version that produced the tokens from there on. A weight update in mid-generation keeps tokens and log-probs
  so far and continues under the new version with the KV recomputed.
- A partial result after an abort is a normal result (`finish_reason="abort"`).
- No cached prefix is served across versions.
- A request for a tenant or version that is not loaded is an error, never silently the base model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

BASE = ""
"""The tenant whose policy is the whole model (full fine-tuning) rather than an adapter."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one turn is sampled."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    """With a seed the tokens depend on the prompt, the weights and the seed alone (given a fixed batch shape)."""


@dataclass(slots=True)
class Generation:
    """One turn's result; `token_ids` includes the stop token if one was sampled."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "abort"]
    version_spans: list[tuple[int, int]] = field(default_factory=list)
    """(index of first token, version), ascending; empty only when no token was produced."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Facts that callers and tests branch on."""

    mixed_adapters: bool
    continues_across_update: bool
    deterministic: bool
    prefix_cache: bool


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt that another engine computed: where to fetch its keys and values. Engines with a split of prefill and
    decode alone make and take it."""

    version: int
    params: dict[str, Any]


class Engine(Protocol):
    capabilities: Capabilities

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, tenant: str, request_id: str) -> Generation:
        """Sample one turn under the tenant's current version. Raises UnknownPolicy, EngineClosed, PromptTooLong."""

    async def prefetch(self, tenant: str, version: int, directory: Path) -> None:
        """Read a version's files into memory while generation goes on; idempotent."""

    async def publish_adapter(self, tenant: str, version: int, directory: Path) -> None:
        """Make a PEFT directory the tenant's current policy (in-flight requests continue under it)."""

    async def withdraw_adapter(self, tenant: str) -> None:
        """Serve this tenant no more: its requests in flight end with what they have, and its place is free. Idempotent;
        not for BASE."""

    async def held(self) -> Collection[str]:
        """Tenants, BASE aside, of whose policy it has anything: served, or only read."""

    async def update_weights(self, version: int, directory: Path) -> None:
        """Make a Hugging Face model directory the current policy of tenant BASE."""

    async def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        """Stop generating after the present token. `keep` holds requests in flight, `abort` ends them."""

    async def resume(self) -> None:
        """Go on; idempotent."""

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests with what they have; unknown ids are ignored."""

    def versions(self) -> dict[str, int]:
        """Current version by tenant."""

    async def health(self) -> bool: ...

    async def stats(self) -> dict[str, Any]:
        """Counters: requests running and waiting, tokens generated and prefilled, seconds busy, swaps."""

    async def close(self) -> None: ...
