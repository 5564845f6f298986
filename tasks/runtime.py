"""What a worker process knows of a run: its configuration and the connections that stages share.

Invariants: installed on every worker, also on those that join later, by `RunPlugin`; a stage receives only the
run's name; connections are made once per process, on first use.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

from distributed import Client, Worker, WorkerPlugin

from infra.chat import ChatCodec
from infra.compute.signals import follow
from infra.proxy.client import ProxyClient
from infra.store.buffer import SampleBuffer
from infra.store.directories import pull_directory
from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection
from rl.config.load import dumps, loads
from rl.config.run import RunConfig
from rl.errors import RollmillError
from rl.placement import placement_of
from tasks.environments import EnvironmentManager
from tasks.functions import RewardScorer

TOKENIZER_FILES = ("*.json", "*.jinja")
"""What of the base model the environment side needs: configuration, tokenizer, chat template; no weights."""


class Runtime:
    """One run in one worker process."""

    def __init__(self, config: RunConfig, proxy_url: str, cache: Path, key: str | None = None):
        self.config = config
        self.proxy = ProxyClient(proxy_url, key)
        self.environments = EnvironmentManager(config)
        self.rewards = RewardScorer(config, cache / "functions")
        self._cache = cache

    @cached_property
    def store(self) -> ObjectStore:
        return ObjectStore.connect(self.config.store)

    @cached_property
    def buffer(self) -> SampleBuffer:
        return SampleBuffer(self.store, self.config.prefix)

    @cached_property
    def codec(self) -> ChatCodec:
        return codec_of(self.config.store, self.config.base_prefix, self._cache)


@lru_cache(maxsize=8)
def codec_of(store: StoreSection, base_prefix: str, cache: Path) -> ChatCodec:
    """One codec for all runs of this process on one base."""
    base = pull_directory(ObjectStore.connect(store), base_prefix, None, cache, only=TOKENIZER_FILES)
    return ChatCodec.from_directory(base)


_RUNTIMES: dict[str, Runtime] = {}


def runtime(run: str) -> Runtime:
    """The runtime of this process. Raises RollmillError when the plugin is not there."""
    try:
        return _RUNTIMES[run]
    except KeyError:
        raise RollmillError(f"run {run!r} is not installed on this worker") from None


def run_key(config: RunConfig, config_json: str, proxy_url: str) -> str:
    """Names a run on a cluster; part of every task key."""
    digest = hashlib.sha256(f"{config_json}{proxy_url}".encode()).hexdigest()[:8]
    return f"{config.tenant}/{config.name}@{digest}"


def install(
    client: Client, config: RunConfig, proxy_url: str, cache: Path, secret: str | None = None, lease: str | None = None
) -> str:
    """Install the run on every worker of the cluster, present and future; its run key. Idempotent. `secret` is the
    key of the role `rollout`; `lease` names what is renewed as long as the run is wanted, if not its key."""
    text = dumps(config)
    key = run_key(config, text, proxy_url)
    client.register_plugin(RunPlugin(key, text, proxy_url, str(cache), secret, lease))
    return key


def uninstall(client: Client, key: str) -> None:
    """Take the run off the workers: its parked environments are closed. A scheduler that is gone is no error."""
    with suppress(Exception):
        client.unregister_worker_plugin(_plugin_name(key))


def _plugin_name(key: str) -> str:
    return f"rollmill-{key}"


@dataclass(frozen=True)
class RunPlugin(WorkerPlugin):
    """Installs a run on a worker. Small and plain, so that any worker can receive it."""

    run: str
    """`run_key` of what follows: another configuration or proxy is another run to a worker."""
    config_json: str
    proxy_url: str
    cache: str
    secret: str | None = field(default=None, repr=False)
    """Key of the role `rollout`."""
    lease: str | None = None
    """What is renewed as long as the run is wanted (`infra.compute.signals`); None is `run`."""

    idempotent = True
    """Installing again, from a restarted flow, must not close the environments of what is in flight."""

    @property
    def name(self) -> str:
        return _plugin_name(self.run)

    def setup(self, worker: Worker) -> None:
        made = Runtime(loads(self.config_json), self.proxy_url, Path(self.cache), self.secret)
        _RUNTIMES[self.run] = made
        from tasks.interact import interact  # imports this module

        stage, classes = placement_of(interact), worker.state.total_resources
        hosted = [d.name for d in made.config.domains if stage.preferred(d.name).value in classes]
        lease, scheduler = self.lease or self.run, worker.scheduler.address
        made.environments.start(lambda unwanted: follow(lease, unwanted, scheduler), hosted)

    async def teardown(self, worker: Worker) -> None:
        gone = _RUNTIMES.pop(self.run, None)
        if gone is not None:
            await gone.environments.close()
            await asyncio.to_thread(gone.rewards.close)
            await gone.proxy.close()
