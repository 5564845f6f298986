"""The reward of `benchmarks.serverless_reward`: alone in its module, for it runs in a function's bundle too."""

from __future__ import annotations

import time

from rewards.protocol import TrajectoryView
from rl.serverless import serverless


@serverless("waiting", memory_mb=256, timeout_s=60)
def waiting(view: TrajectoryView, seconds: float) -> dict[str, float]:
    """Two parts, what it took and when it began (seconds). It waits, as a reward does whose tests run in another
    process: on a few cores one that computes would measure how they are shared."""
    began, at = time.perf_counter(), time.time()
    time.sleep(seconds)
    return {"busy": time.perf_counter() - began, "began": at}
