"""vLLM servers that somebody else runs, as members of a fleet.

Invariants: the key comes from the environment; one that is away is asked again until it is there, and joins then; it
is this proxy's alone, for only one may say what it serves.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from infra.engines.protocol import Engine
from infra.engines.vllm_config import vllm_engine
from infra.proxy.fleet import Fleet
from infra.proxy.members import Facts
from infra.proxy.secret import key_of_servers
from rl.config.engine import ExternalEngine, VLLMEngineSection
from rl.config.run import RunConfig
from rl.placement import HardwareClass


class External:
    """One server. `base` is the directory of the model that it was started with."""

    def __init__(self, section: ExternalEngine, config: RunConfig, base: Path):
        assert isinstance(config.engine, VLLMEngineSection)
        self._section, self._config, self._engine, self._base = section, config, config.engine, base

    def join(self, fleet: Fleet) -> None:
        """As soon as it answers. Call on the fleet's event loop."""
        name = urlsplit(self._section.url).netloc
        slots = self._engine.max_batch
        capacity = slots * (self._engine.max_length or self._config.rollout.max_tokens)
        facts = Facts(name, "external", HardwareClass(self._section.hardware), slots, capacity)
        fleet.members.expect(facts, self._connect)

    async def _connect(self) -> Engine:
        """Raises EngineClosed while it is away, BadRequest when it was started otherwise than is needed."""
        # below the directory of the proxy, where the versions are, too
        staging = self._base.parent.parent / "staging"
        engine = vllm_engine(self._config, self._engine, self._section.url, key_of_servers(), self._base, staging)
        try:
            await engine.start()
        except BaseException:
            await engine.close()
            raise
        return engine
