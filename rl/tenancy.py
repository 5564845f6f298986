"""What a job of a service got and gave, from its events and its log: the figures of the table of tenants.

    time to first step     submitted -> its first optimizer step committed, waiting for a place included
    step latency           from one commit to the next, mean
    queue wait             a batch is complete -> the trainer begins with it, mean
    log-prob gap           largest difference of a log-prob between engine and trainer under equal versions
    trainer share          of the seconds in which trainers were busy with some job
    engine share           of the tokens that the engines generated
    cost share             the mean of the two: a step costs both

Invariants: pure; what can not be known yet is None, never 0; the shares of all jobs add up to 1 where anything was
done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from rl.jobs import Entry
from rl.records import Step

BUSY = ("restore", "train")
"""Spans of a step in which its trainer does nothing else."""


@dataclass(frozen=True, slots=True)
class JobFigures:
    """One row. Times are in seconds."""

    job: str
    state: str
    version: int
    steps: int
    reward: float | None
    """Mean over its newest steps, a fifth of them."""
    time_to_first_step: float | None
    step_latency: float | None
    queue_wait: float | None
    trainer_s: float
    """Its trainer was busy with it."""
    tokens: int
    """Generated."""
    tokens_trained: int
    logprob_gap: float | None
    trainer_share: float | None = None
    engine_share: float | None = None
    cost_share: float | None = None
    unread: str | None = None
    """Why its log could not be read; then the figures from there are missing."""


def figures(entry: Entry, records: Sequence[Step], tokens: int) -> JobFigures:
    """Of one job, without its shares. `records` are its steps in order, that of version 0 too."""
    steps = [record for record in records if record.version > 0]
    tail = steps[-max(1, len(steps) // 5) :]
    return JobFigures(
        job=entry.job.id,
        state=str(entry.state),
        version=records[-1].version if records else 0,
        steps=entry.job.training.steps,
        reward=_mean([s.metrics["reward"] for s in tail if "reward" in s.metrics]),
        time_to_first_step=steps[0].time - entry.submitted if steps else None,
        step_latency=_mean([after.time - before.time for before, after in pairwise(records)]),
        queue_wait=_mean([s.metrics["queue_s"] for s in steps if "queue_s" in s.metrics]),
        trainer_s=sum(busy(s) for s in steps),
        tokens=tokens,
        tokens_trained=int(sum(s.metrics.get("tokens", 0.0) for s in steps)),
        logprob_gap=max((s.metrics["fresh_gap_max"] for s in steps if "fresh_gap_max" in s.metrics), default=None),
    )


def busy(step: Step) -> float:
    """Seconds that the trainer was busy with a step."""
    return sum(step.metrics.get(f"{phase}_s", 0.0) for phase in BUSY)


def with_shares(rows: Sequence[JobFigures]) -> list[JobFigures]:
    """The rows with what each had of all; where a log could not be read, nothing is known of that one's trainer."""
    seconds, tokens = sum(row.trainer_s for row in rows), sum(row.tokens for row in rows)
    return [row if row.unread else _shared(row, seconds, tokens) for row in rows]


def _shared(row: JobFigures, seconds: float, tokens: int) -> JobFigures:
    trainer = row.trainer_s / seconds if seconds else None
    engine = row.tokens / tokens if tokens else None
    cost = _mean([share for share in (trainer, engine) if share is not None])
    fields = {name: getattr(row, name) for name in JobFigures.__dataclass_fields__}
    return JobFigures(**fields | {"trainer_share": trainer, "engine_share": engine, "cost_share": cost})


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
