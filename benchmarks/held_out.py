"""The held-out reward of the versions of a run that ended, and when each of them was there.

Invariant: all versions play the same problems with the same seed, and nothing is injected there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from benchmarks.synchronous_trl import held_out
from benchmarks.whole_run import environ
from infra.store.log import CommitLog
from infra.store.objects import ObjectStore
from infra.store.weights import WeightStore
from rl.config.run import RunConfig
from rl.records import Step

EVERY = 2
"""Of so many versions one is played."""
PROBLEMS = 256


def kept(config: RunConfig, out: Path, env: Mapping[str, str]) -> dict[int, float]:
    """Seconds from version 0 until every `EVERY`-th version, which it pulls into `out/v{version}`."""
    with environ(env):
        store = ObjectStore.connect(config.store)
        steps = [r for r in CommitLog(store, config.prefix, "benchmark").history() if isinstance(r, Step)]
        weights = WeightStore.open(config.weights, store)
        for step in steps[::EVERY]:
            found = weights.pull(config.prefix + step.state.prefix, step.state.manifest_sha256, out / "cache")
            (out / f"v{step.version}").symlink_to(found / "model")
        weights.close()
    return {step.version: step.time - steps[0].time for step in steps[::EVERY]}


def rewards(config: RunConfig, base: Path, out: Path, versions: Iterable[int]) -> dict[int, float]:
    """Of the versions in `out`; version 0 is `base`."""
    disable_progress_bar()  # of each model that is loaded
    found = {v: held_out(config, base, out / f"v{v}" if v else base, PROBLEMS) for v in versions}
    print(f"{out.name}: " + ", ".join(f"v{v} {r:.3f}" for v, r in found.items()), flush=True)
    return found


def reached(goal: float, rewards: Mapping[int, float], seconds: Mapping[int, float]) -> float | None:
    """Seconds until the first version of this reward."""
    return next((seconds[v] for v in sorted(seconds) if rewards[v] >= goal), None)
