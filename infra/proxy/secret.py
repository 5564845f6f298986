"""The keys of a run on their way to its processes.

Invariant: they travel in environments and in Dask's own channel alone, each process getting the role that it needs;
never in a file, an argument list or a log.
"""

from __future__ import annotations

import os

from rl.errors import ConfigError

CONTROL_KEY = "ROLLMILL_CONTROL_KEY"
"""Environment variable: the key of the trainer, the driver and the engines."""
ROLLOUT_KEY = "ROLLMILL_ROLLOUT_KEY"
"""Environment variable: the key of what plays trajectories."""
SERVERS_KEY = "ROLLMILL_VLLM_KEY"
"""Environment variable: the key of the vLLM servers in `engine.external`."""


def control_key() -> str | None:
    """What this process was given; None where the proxy asks for none."""
    return os.environ.get(CONTROL_KEY)


def rollout_key() -> str | None:
    """What this process was given; None where the proxy asks for none."""
    return os.environ.get(ROLLOUT_KEY)


def key_of_servers() -> str:
    """Of the vLLM servers that somebody else runs. Raises ConfigError where there is none."""
    key = os.environ.get(SERVERS_KEY, "")
    if not key:
        raise ConfigError(
            f"{SERVERS_KEY} is not set: give the servers of engine.external and the run one key, such as "
            "`openssl rand -hex 32` makes"
        )
    return key
