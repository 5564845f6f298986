"""The adapters on one vLLM server: a name and a path of its own for every version, counted until it can go.

    staged (files copied) -> current (new requests use it) -> retired (a later one is current) -> unloaded, deleted
                                                              when the last request that holds it has ended

Invariants
- Neither a name nor a path is ever used for two versions: a server's prefix cache is keyed by them.
- Files stay for a while after the name is unloaded and nothing holds it: until then a server may read them again.
- Without I/O to the server; `VLLMEngine` loads and unloads what is decided here.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import uuid
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from infra.engines.errors import NoAdapterSlot, UnknownPolicy, WeightMismatch
from infra.engines.protocol import BASE

STAGED = 2
"""Versions of a tenant whose files are ready and that were never served."""
BURIED = 8
"""Unloaded adapters whose files stay: a request that was told to end may still run for a moment."""


@dataclass(slots=True, eq=False)
class Adapter:
    """One version of one tenant on the server."""

    tenant: str
    version: int
    name: str
    directory: Path
    holds: int = 0
    """Requests in flight under it."""
    retired: bool = False


class AdapterTable:
    """`slots`: adapters of tenants that can be current at once. `staging` belongs to this object alone and is where
    the server finds the files."""

    def __init__(self, slots: int, staging: Path):
        self.slots = slots
        self.current: dict[str, Adapter] = {}
        self._buried: deque[Adapter] = deque()
        self._staged: dict[tuple[str, int], Adapter] = {}
        self._staging, self._lock = staging, threading.Lock()
        self._nonce, self._serial = uuid.uuid4().hex[:8], 0

    def stage(self, tenant: str, version: int, directory: Path) -> Adapter:
        """Copy a version's files to a path of their own; idempotent, from any thread.

        Raises NoAdapterSlot, WeightMismatch.
        """
        if tenant not in self.current and len(self.current) >= self.slots:
            raise NoAdapterSlot(
                f"tenant {tenant!r} needs a slot for its adapter, but all {self.slots} are in use by "
                f"{', '.join(sorted(self.current)) or 'none'}; start the engine with more (max_loras)"
            )
        with self._lock:
            if (adapter := self._staged.get((tenant, version))) is None:
                adapter = self._named(tenant, version)
                try:
                    shutil.copytree(directory, adapter.directory)
                except OSError as error:
                    shutil.rmtree(adapter.directory, ignore_errors=True)
                    raise WeightMismatch(f"{directory} can not be copied for the server: {error}") from error
                self._staged[tenant, version] = adapter
            unused = [staged for staged in self._staged.values() if staged.tenant == tenant][:-STAGED]
            for older in unused:
                self.drop(tenant, older.version)
            return adapter

    def stage_zero(self, like: Adapter) -> Adapter:
        """An adapter that changes nothing, of the first layer which `like` changes."""
        import torch  # seconds and memory that a proxy without an engine of its own does not need
        from safetensors.torch import save_file

        zero = self._named(BASE, 0)
        zero.directory.mkdir(parents=True)
        config = json.loads((like.directory / "adapter_config.json").read_text())
        with safe_open(next(like.directory.glob("adapter_model*.safetensors")), "pt") as file:
            first = min(name for name in file.keys() if ".lora_A." in name)  # noqa: SIM118
            second = first.replace(".lora_A.", ".lora_B.")
            tensors = {name: torch.zeros_like(file.get_tensor(name)) for name in (first, second)}
        config["target_modules"] = [first.removesuffix(".lora_A.weight").rpartition(".")[2]]
        (zero.directory / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, zero.directory / "adapter_model.safetensors")
        return zero

    def switch(self, adapter: Adapter) -> Adapter | None:
        """Make it current; returns the one before, now retired, if there was one."""
        self._staged.pop((adapter.tenant, adapter.version), None)
        before = self.current.get(adapter.tenant)
        self.current[adapter.tenant] = adapter
        if before is not None:
            before.retired = True
        return before

    def held(self) -> set[str]:
        """Tenants with a version that is current or staged."""
        with self._lock:
            return {*self.current, *(tenant for tenant, _ in self._staged)}

    def withdraw(self, tenant: str) -> Adapter | None:
        """The tenant is served no more; its adapter, now retired, if it had one."""
        for _, version in [key for key in self._staged if key[0] == tenant]:
            self.drop(tenant, version)
        adapter = self.current.pop(tenant, None)
        if adapter is not None:
            adapter.retired = True
        return adapter

    def drop(self, tenant: str, version: int) -> None:
        """Forget a staged version that could not be served."""
        if (adapter := self._staged.pop((tenant, version), None)) is not None:
            shutil.rmtree(adapter.directory, ignore_errors=True)

    def hold(self, tenant: str) -> Adapter:
        """The tenant's current adapter, for one request. Raises UnknownPolicy."""
        adapter = self.current.get(tenant)
        if adapter is None:
            served = ", ".join(repr(t) for t in self.current) or "none"
            raise UnknownPolicy(f"tenant {tenant!r} has no version loaded (served: {served})")
        adapter.holds += 1
        return adapter

    def release(self, adapter: Adapter) -> bool:
        """A request has ended; whether the adapter can be unloaded now."""
        adapter.holds -= 1
        return self.idle(adapter)

    def idle(self, adapter: Adapter) -> bool:
        return adapter.retired and adapter.holds == 0

    def bury(self, adapter: Adapter) -> None:
        """Its name is unloaded; its files go when enough others have followed."""
        self._buried.append(adapter)
        while len(self._buried) > BURIED:
            shutil.rmtree(self._buried.popleft().directory, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)

    def _named(self, tenant: str, version: int) -> Adapter:
        self._serial += 1
        readable = re.sub(r"[^A-Za-z0-9_-]", "_", tenant) or "zero"
        name = f"{readable}-v{version}-{self._nonce}-{self._serial}"
        return Adapter(tenant, version, name, self._staging / name)
