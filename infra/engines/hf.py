"""The embedded engine: a transformers model in this process, batched continuously (see `loop`).

Invariants
- Files are read, verified and brought to the device outside the loop; the loop pays for the exchange alone, between
  two tokens. A swap that fails leaves the old version served and every request going on.
- In deterministic mode a request runs alone, from its prompt to its end, in one slot, without a reused prefix:
  its result is a pure function of prompt, weights and seed, bit by bit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from transformers import AutoModelForCausalLM

from infra.engines.adapters import AdapterBank
from infra.engines.errors import BadRequest, BaseFrozen, ModelUnusable
from infra.engines.fitting import Adapter, AdapterFiles, Fitting
from infra.engines.kv import SlotCache
from infra.engines.loop import TokenLoop
from infra.engines.protocol import BASE, Capabilities, Generation, Sampling
from infra.engines.requests import check_request
from infra.engines.slots import Row, Slots
from infra.engines.weights import Tensors, WeightTarget, read_tensors
from rl.errors import DeadlineExceeded

T = TypeVar("T")
CPU_CACHE_BYTES = 2 << 30
GPU_CACHE_SHARE = 0.3
PREFETCHED = 2
"""Versions of a tenant held in memory, ready to be served but not yet served. A version of the whole model takes as
much memory as the one that is served."""
CLOSE_S = 30.0


class HFEngine:
    """One model and its adapters. `base_version` is the version of the weights in `directory` as the policy of
    tenant BASE; None serves BASE only after the first `update_weights`. Blocks while it loads.

    Raises ModelUnusable when the directory holds nothing that can be served.
    """

    def __init__(
        self,
        directory: Path,
        *,
        device: str = "auto",
        dtype: str = "float32",
        max_batch: int = 64,
        threads: int = 1,
        deterministic: bool = False,
        base_version: int | None = None,
        mixed_adapters: bool = True,
    ):
        self.capabilities = Capabilities(
            mixed_adapters=mixed_adapters,
            continues_across_update=True,
            deterministic=deterministic,
            prefix_cache=not deterministic,
        )
        module = _load(directory, device, dtype)
        config = module.config
        self._vocabulary: int = config.vocab_size
        self._target, self._fitting = WeightTarget(module), Fitting(module)
        budget = CPU_CACHE_BYTES
        if module.device.type == "cuda":
            budget = int(torch.cuda.get_device_properties(module.device).total_memory * GPU_CACHE_SHARE)
        batch = 1 if deterministic else max_batch
        cache = SlotCache(config, batch if deterministic else 2 * batch, module.dtype, module.device)
        slots = Slots(cache, batch, not deterministic, budget)
        self.max_length: int = min(config.max_position_embeddings, slots.longest)
        """Tokens of one sequence, prompt included."""
        self.capacity: int = slots.longest
        """Tokens whose keys and values have room."""
        self._loop = TokenLoop(module, slots, AdapterBank(module), threads, mixed_adapters)
        if base_version is not None:
            self._loop.versions[BASE] = base_version
        self._ready: dict[tuple[str, int], Any] = {}
        """By tenant and version, in the order in which they were read."""
        self._rows: dict[str, Row] = {}
        self._random = random.SystemRandom()
        self._loop.start()

    # -- generation --------------------------------------------------------------------------------------------

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, tenant: str, request_id: str) -> Generation:
        """See the protocol. Cancelling the call frees the slot. Raises BadRequest too."""
        row = self._rows[request_id] = self._row(token_ids, sampling, tenant, request_id)
        self._loop.submit(row)
        try:
            return await asyncio.wrap_future(row.future)
        except asyncio.CancelledError:
            self._loop.call(lambda: self._loop.abort([request_id]))
            raise
        finally:
            self._rows.pop(request_id, None)

    def so_far(self, request_id: str) -> Generation | None:
        """What a request in flight has sampled until now; None for one that is not."""
        row = self._rows.get(request_id)
        return None if row is None else row.so_far()

    def _row(self, token_ids: Sequence[int], sampling: Sampling, tenant: str, request_id: str) -> Row:
        tokens = list(token_ids)
        check_request(tokens, sampling, self._vocabulary, self.max_length)
        future: Future[Generation] = Future()
        future.set_running_or_notify_cancel()
        return Row(
            request_id,
            tenant,
            tokens,
            prompt_length=len(tokens),
            limit=min(len(tokens) + sampling.max_new_tokens, self.max_length),
            stops=frozenset(sampling.stop_token_ids),
            sampling=sampling,
            seed=self._random.getrandbits(64) if sampling.seed is None else sampling.seed,
            future=future,
        )

    async def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        await asyncio.wrap_future(self._loop.call(lambda: self._loop.pause(mode)))

    async def resume(self) -> None:
        await asyncio.wrap_future(self._loop.call(self._loop.resume))

    async def abort(self, request_ids: Collection[str]) -> None:
        wanted = frozenset(request_ids)
        await asyncio.wrap_future(self._loop.call(lambda: self._loop.abort(wanted)))

    # -- versions ----------------------------------------------------------------------------------------------

    async def prefetch(self, tenant: str, version: int, directory: Path) -> None:
        """Read, verify and bring to the device. Raises WeightMismatch."""
        await (self._weights(version, directory) if tenant == BASE else self._adapter(tenant, version, directory))

    async def publish_adapter(self, tenant: str, version: int, directory: Path) -> None:
        """See the protocol; the served version again is a no-op. Raises WeightMismatch, BadRequest for BASE."""
        if tenant == BASE:
            raise BadRequest("an adapter needs a tenant of its own; the base is updated by update_weights")
        adapter = await self._adapter(tenant, version, directory)
        try:
            await asyncio.wrap_future(self._loop.call(lambda: self._switch_adapter(tenant, version, adapter)))
        finally:
            self._ready.pop((tenant, version), None)

    async def withdraw_adapter(self, tenant: str) -> None:
        """See the protocol."""
        self._ready = {key: made for key, made in self._ready.items() if key[0] != tenant}
        await asyncio.wrap_future(self._loop.call(lambda: self._loop.withdrawn(tenant)))

    async def held(self) -> Collection[str]:
        """See the protocol."""
        return {*self._loop.versions, *(tenant for tenant, _ in self._ready)} - {BASE}

    async def update_weights(self, version: int, directory: Path) -> None:
        """See the protocol; the served version again is a no-op. Raises WeightMismatch, BaseFrozen."""
        staged = await self._weights(version, directory)
        try:
            await asyncio.wrap_future(self._loop.call(lambda: self._switch_weights(version, staged)))
        finally:
            self._ready.pop((BASE, version), None)

    async def _weights(self, version: int, directory: Path) -> Tensors:
        target = self._target
        return await self._prepared(BASE, version, lambda: target.stage(target.verify(read_tensors(directory))))

    async def _adapter(self, tenant: str, version: int, directory: Path) -> Adapter:
        return await self._prepared(tenant, version, lambda: self._fitting.fit(AdapterFiles.read(directory)))

    async def _prepared(self, tenant: str, version: int, prepare: Callable[[], T]) -> T:
        key = (tenant, version)
        if key not in self._ready:
            self._ready[key] = await asyncio.to_thread(prepare)
            for older in [kept for kept in self._ready if kept[0] == tenant][:-PREFETCHED]:
                del self._ready[older]
        return self._ready[key]

    def _switch_weights(self, version: int, staged: Tensors) -> None:
        if self._loop.versions.get(BASE) == version:
            return
        if self._loop.bank.tenants:
            tenants = ", ".join(sorted(self._loop.bank.tenants))
            raise BaseFrozen(f"the base can not become version {version}: adapters of {tenants} rest on it")
        self._target.exchange(staged)
        self._loop.switched(BASE, version)

    def _switch_adapter(self, tenant: str, version: int, adapter: Adapter) -> None:
        if self._loop.versions.get(tenant) == version:
            return
        self._loop.bank.put(tenant, adapter)
        self._loop.switched(tenant, version)

    def versions(self) -> dict[str, int]:
        return dict(self._loop.versions)

    # -- life --------------------------------------------------------------------------------------------------

    async def health(self) -> bool:
        return self._loop.alive

    async def stats(self) -> dict[str, Any]:
        """Counters since the start: requests, tokens generated, prefilled and reused from a prefix, rows preempted,
        swaps; rows running, waiting, kept; seconds busy; whether it is paused; the share of the room for keys and
        values that running rows take."""
        loop = self._loop
        return {
            "kv_usage": sum(len(row.tokens) for row in list(loop.slots.running)) / self.capacity,
            **loop.counters,
            "running": len(loop.slots.running),
            "waiting": len(loop.waiting),
            "kept": loop.slots.kept,
            "busy_s": loop.busy_s,
            "paused": loop.paused,
        }

    async def close(self) -> None:
        """End the loop; requests in flight get EngineClosed. Idempotent. Raises DeadlineExceeded if it hangs."""
        self._loop.close()
        if not await asyncio.to_thread(self._loop.join, CLOSE_S):
            raise DeadlineExceeded(f"the engine's loop did not end within {CLOSE_S:.0f} s")


def _load(directory: Path, device: str, dtype: str) -> Any:
    if not (directory / "config.json").is_file():
        raise ModelUnusable(f"{directory}: no config.json there; it must be a Hugging Face model directory")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        module, found = AutoModelForCausalLM.from_pretrained(
            directory,
            output_loading_info=True,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
        module = module.to(device)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelUnusable(f"{directory}: {type(error).__name__}: {error}") from error
    if found["missing_keys"]:
        raise ModelUnusable(f"{directory}: tensor {min(found['missing_keys'])} is missing in the files")
    kinds = set(getattr(module.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ModelUnusable(
            f"{directory}: attention of kind {', '.join(sorted(kinds - {'full_attention'}))} is not served"
        )
    return module.eval().requires_grad_(False)
