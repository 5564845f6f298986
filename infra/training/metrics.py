"""The figures of one step: what the batch was, how the time went, what the optimizer said.

    reward                                       mean over the trajectories that were looked at: those of the batch
                                                 and those of groups without signal, which are not trained
    reward_trained, reward/{part}, reward/{domain}   means over the trained trajectories
    lag_mean, lag_max                            of the trained groups, in versions
    dropped, dropped_{reason}                    attempts dropped with this step and settled since the last one
    evicted/{domain}/{n}                         of these, groups that grew too old, whose longest member had
                                                 generated up to n tokens (0: was still running)
    turns, truncated, retries                    per trajectory: turns, share truncated, failed tries before it
    trajectories                                 looked at
    groups, tokens, tokens_per_s                 trained
    {phase}_s, span_{phase}_start, span_{phase}_end   wait, swap, train, push (seconds; epoch seconds); under alpha >= 1
                                                 swap and push go on beside the others (in the eager order the swap
                                                 is that of the version before), and there is `stall`: what publishing
                                                 held up, to copy the weights and for the version before
    idle                                         share of the step that the trainer waited for a batch
    loss, grad_norm, learning_rate, kl, entropy, clip_fraction, ess, mismatch_kl, ...   see `correction.summary`

Invariant: wall-clock times are for people and plots; no decision reads them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean

from infra.training.batches import Batch, Seen
from rl.records import Drop
from rl.trajectory import Status, mean_reward_parts


class Clock:
    """Wall-clock spans of the phases of one step, which begins now."""

    def __init__(self) -> None:
        self._spans: dict[str, tuple[float, float]] = {}
        self._begin = time.time()
        self._end: float | None = None

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        start = time.time()
        try:
            yield
        finally:
            self._spans[phase] = (start, time.time())

    def start(self, phase: str) -> None:
        self._spans[phase] = (time.time(), math.nan)

    def stop(self, phase: str) -> None:
        self._spans[phase] = (self._spans[phase][0], time.time())

    def close(self) -> None:
        """The step ends now, for the trainer; what was begun beside it may go on."""
        self._end = time.time()

    @property
    def whole(self) -> float:
        """Seconds of the step, up to now unless it was closed."""
        return (self._end or time.time()) - self._begin

    def spans(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for phase, (start, end) in sorted(self._spans.items()):
            found |= {f"{phase}_s": end - start, f"span_{phase}_start": start, f"span_{phase}_end": end}
        return found

    def figures(self) -> dict[str, float]:
        found = self.spans()
        return found | {"idle": found.get("wait_s", 0.0) / self.whole}


def of_batch(batch: Batch, dropped: Sequence[Drop], seen: Seen) -> dict[str, float]:
    """Figures of the samples. `dropped` goes into the step's record; `seen` went before it."""
    members = [member for group in batch.groups for member in group.members]
    counts = Counter(seen.settled)
    counts.update(drop.reason.value for drop in dropped)
    figures = {
        "reward": fmean([*(m.reward for m in members), *seen.flat]),
        "reward_trained": fmean(m.reward for m in members),
        "lag_mean": fmean(batch.lags),
        "lag_max": float(max(batch.lags)),
        "dropped": float(counts.total()),
        "turns": fmean(m.turns for m in members),
        "truncated": fmean(m.status is Status.TRUNCATED for m in members),
        "retries": fmean(m.retry for m in members),
        "groups": float(len(batch.groups)),
        "trajectories": float(len(members) + len(seen.flat)),
    }
    figures |= {f"dropped_{reason}": float(n) for reason, n in sorted(counts.items())}
    figures |= {f"evicted/{domain}/{tokens}": float(n) for (domain, tokens), n in sorted(seen.evicted.items())}
    figures |= {f"reward/{name}": value for name, value in mean_reward_parts(members).items()}
    domains = sorted({m.problem.domain for m in members})
    if len(domains) > 1:
        figures |= {f"reward/{d}": fmean(m.reward for m in members if m.problem.domain == d) for d in domains}
    return figures


def finite(figures: Mapping[str, float]) -> dict[str, float]:
    """What a record may carry: JSON has no NaN."""
    return {name: float(value) for name, value in figures.items() if math.isfinite(value)}
