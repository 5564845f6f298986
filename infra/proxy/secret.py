"""The keys of a run on their way to its processes.

Invariant: they travel in environments and in Dask's own channel alone, each process getting the role that it needs;
never in a file, an argument list or a log.
"""

from __future__ import annotations

import os

CONTROL_KEY = "ROLLMILL_CONTROL_KEY"
"""Environment variable: the key of the trainer, the driver and the engines."""
ROLLOUT_KEY = "ROLLMILL_ROLLOUT_KEY"
"""Environment variable: the key of what plays trajectories."""


def control_key() -> str | None:
    """What this process was given; None where the proxy asks for none."""
    return os.environ.get(CONTROL_KEY)


def rollout_key() -> str | None:
    """What this process was given; None where the proxy asks for none."""
    return os.environ.get(ROLLOUT_KEY)
