"""What the engines of a fleet serve: a version of each tenant's policy, and how an engine that joins comes to it.

Invariant: an engine that joins serves all of it, and runs. Whoever had it pause is gone, or else holds back its work.
"""

from __future__ import annotations

from pathlib import Path

from infra.engines.protocol import BASE, Engine


class Policies:
    """Lives on one event loop."""

    def __init__(self) -> None:
        self.served: dict[str, tuple[int, Path]] = {}
        """Version and its files by tenant."""

    def versions(self) -> dict[str, int]:
        return {tenant: version for tenant, (version, _) in self.served.items()}

    async def ready(self, engine: Engine) -> None:
        """Have an engine read what is served."""
        for tenant, (version, directory) in list(self.served.items()):
            await engine.prefetch(tenant, version, directory)

    async def bring(self, engine: Engine) -> None:
        """Have an engine serve what is served, and go on: a proxy that died may have left it paused, and nothing but
        this would tell it to."""
        for tenant, (version, directory) in self.served.items():
            await publish(engine, tenant, version, directory)
        await engine.resume()


async def publish(engine: Engine, tenant: str, version: int, directory: Path) -> None:
    """Make it the tenant's policy on one engine."""
    if tenant == BASE:
        await engine.update_weights(version, directory)
    else:
        await engine.publish_adapter(tenant, version, directory)
