"""Runs of the preset `long_tail` that compare: one after the other, on one set of services and one warmed-up model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from benchmarks.attainable import least_step
from benchmarks.report import machine
from benchmarks.whole_run import Measured, RunFailed, run, warm_model

PRESET = "long_tail"


@dataclass(frozen=True)
class Size:
    first: int
    """The version after which steps count: the pipeline is full."""
    last: int
    """The last version that counts."""
    more: int = 0
    """Steps that the run goes on for: at its end it waits for whatever it had put off."""


def work_bound(m: Measured) -> float:
    return max(m.busiest_s, m.cpu_s / machine()["cores"])


def least(m: Measured) -> float:
    """Seconds that a step of this mode takes at least, with groups and training as long as they were in this run."""
    return least_step(m.config.mode, m.config.staleness.alpha, m.config.waits, m.before, m.counted, work_bound(m))


def show(label: str, m: Measured) -> None:
    shares = ", ".join(f"{stage} {share:.0%}" for stage, share in m.shares.items())
    dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(m.dropped.items())) or "none"
    print(
        f"{label}: {m.step_s:.2f} s a step ({m.steps} steps, {m.tokens_per_s:.0f} tokens/s), at least {least(m):.2f}; "
        f"slowest group {m.slowest_s:.2f}, mean {m.group_s:.2f}, training {m.train_s:.2f}, processor {m.cpu_s:.2f} of "
        f"which {m.busiest_s:.2f} in {m.busiest}; busy: {shares}; injected {m.injected:.0%} of trajectory time; lag "
        f"{m.lag_mean:.2f} up to {m.lag_max:.0f}; dropped: {dropped}; reward {m.reward:.2f}; {m.wall_s:.0f} s in all",
        flush=True,
    )


class Bench:
    """Runs until `minutes` are over: a run that would begin later is left out, one that is not done then is ended."""

    def __init__(self, env: dict[str, str], minutes: float):
        self.env, self._end = env, monotonic() + 60 * minutes
        self.model = Path(warm_model(PRESET, (), env))

    def run(self, label: str, size: Size, *sets: str) -> Measured | None:
        """None when the run failed or was left out, which is told: one shall not cost the figures of the others."""
        left = self._end - monotonic()
        if left <= 0:
            print(f"{label} left out: the time is over", file=sys.stderr, flush=True)
            return None
        model = f"model.source={{type: pretrained, path: {self.model}}}"
        steps = f"training.steps={size.last + size.more}"
        given = [f"name={label}", model, "model.warmstart=null", steps, "evaluation.problems=0", *sets]
        try:
            measured = run(PRESET, given, self.env, size.first, size.last, left)
        except RunFailed as error:
            print(f"{label} failed: {error}", file=sys.stderr, flush=True)
            return None
        show(label, measured)
        return measured
