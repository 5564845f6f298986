"""The beginning of a run: its prefix in the store, its configuration, its base model.

Invariants
- The store is probed before the run writes anything: one that does not honour create-if-absent is refused.
- A run's configuration is written once; a resumed run may change only what does not change what was trained
  (`RESUMABLE`); anything else is refused by field.
- The base model lies in the store before any process needs it, with its checksum.
"""

from __future__ import annotations

import uuid
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from infra.models.sources import materialise
from infra.store.directories import push_directory
from infra.store.errors import NotFound
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore, probe_atomicity
from rl.config.load import dumps, loads, plain, restored, stored_tree
from rl.config.run import RunConfig
from rl.errors import ConfigError, RollmillError

RESUMABLE = (
    "training.steps",
    "training.max_flat_groups",
    "evaluation",
    "pools",
    "store",
    "weights",
    "retention",
    "tracking",
    "alerts",
    "deadlines",
    "restarts",
    "engine",
    "rollout.unit",
    "domains.*.runs_on",
    "domains.*.concurrency",
    "domains.*.warm",
)
"""Fields that a resumed run may change."""


LOOKING = ("evaluation", "pools", "engine", "store", "weights", "tracking", "alerts", "deadlines")
"""Sections that say how to look at a run, not what it is."""
STORED = "the run's configuration"


class RunExists(RollmillError):
    """The run's prefix is in use and resuming was not asked for."""


def reach(config: RunConfig, create: bool = False) -> ObjectStore:
    """The store of a configuration, once it answered; `create` its bucket, if missing, where that is not AWS. Raises
    BucketMissing, and StoreUnavailable within seconds, not the minute that a store in use is given to come back."""
    store = ObjectStore.connect(config.store)
    store.ensure_bucket(create)
    return store


def open_run(config: RunConfig, resume: bool) -> CommitLog:
    """Claim the run's prefix in the store, or join it. Raises StoreUnavailable, StoreNotAtomic, RunExists,
    ConfigError."""
    store = reach(config, create=True)
    probe_atomicity(store.client, store.bucket, config.prefix)
    claim(store, config, resume)
    log = CommitLog(store, config.prefix, writer="observer")
    log.sync()
    return log


def claim(store: ObjectStore, config: RunConfig, resume: bool) -> None:
    """Write the run's configuration, or see that it began with this one. Raises RunExists, ConfigError."""
    key = f"{config.prefix}config.json"
    if not store.create(key, dumps(config).encode(), nonce=uuid.uuid4().hex):
        _join(config, store.get(key).decode(), resume)


def join_run(config: RunConfig) -> tuple[RunConfig, CommitLog]:
    """A run that exists, to look at: its own configuration, but for the sections in `LOOKING`, which are the given
    one's; and its log. Creates nothing. Raises StoreUnavailable, ConfigError."""
    store = reach(config)
    given, stored = plain(config), stored_tree(_text(store, config.prefix), STORED)
    log = CommitLog(store, config.prefix, writer="observer")
    log.sync()
    return restored(RunConfig, stored | {section: given[section] for section in LOOKING}, STORED), log


def stored_config(store: ObjectStore, prefix: str) -> RunConfig:
    """The configuration that a run began with. Raises ConfigError when there is no such run, ConfigTooNew."""
    return loads(_text(store, prefix), f"the configuration of run {prefix.rstrip('/')!r}")


def _text(store: ObjectStore, prefix: str) -> str:
    try:
        return store.get(f"{prefix}config.json").decode()
    except NotFound as error:
        raise ConfigError(f"no run at {prefix!r} in bucket {store.bucket!r}") from error


def base_model(config: RunConfig, models: Path) -> Path:
    """The initial weights as a directory on this machine, before any warm start."""
    return materialise(config.model, models, config.seed)


def push_base(config: RunConfig, store: ObjectStore, directory: Path) -> str:
    """Upload the base of the run; the checksum of its manifest."""
    return push_directory(store, config.base_prefix, directory)


def has_base(config: RunConfig, store: ObjectStore) -> bool:
    return store.exists(f"{config.base_prefix}manifest.json")


def _join(config: RunConfig, stored: str, resume: bool) -> None:
    prefix = config.prefix.rstrip("/")
    if not resume:
        raise RunExists(
            f"run {prefix!r} exists in bucket {config.store.bucket!r}; resume it with --resume, or choose another name"
        )
    began = loads(stored, STORED)  # with what it did not know of at its default
    changed = sorted(differences(plain(began), plain(config)))
    fixed = [path for path in changed if not any(fnmatch(path, f) or path.startswith(f"{f}.") for f in RESUMABLE)]
    if fixed:
        raise ConfigError(
            f"run {prefix!r} began with other values of {', '.join(fixed)}; a resumed run may change only "
            f"{', '.join(RESUMABLE)}: put them back, or choose another name"
        )


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """The dotted paths at which two trees differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            difference
            for key in sorted(a.keys() | b.keys())
            for difference in differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        ]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = zip(a, b, strict=True)
        return [d for at, (x, y) in enumerate(pairs) for d in differences(x, y, f"{path}.{at}")]
    return [] if a == b else [path]
