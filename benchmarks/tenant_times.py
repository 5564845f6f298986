"""How long the stages of a service's jobs took, read from what they left in the store: what the simulator is fed with.

Invariants: times are of the jobs that are asked about, each the mean over its steps; a job that waited for the place of
another one begins when that one's last version was committed. Nothing here is the time that all took together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from infra.store.buffer import SampleBuffer
from infra.store.objects import ObjectStore
from rl.config.tenants import ServiceConfig
from rl.jobs import Entry
from rl.records import Step
from rl.tenancy import busy
from rl.trajectory import Group
from sim.jobs import JobTimes, ServiceTimes

SEGMENTS = 100_000
LEAST_S = 1e-3


def service_times(
    store: ObjectStore, service: ServiceConfig, entries: Sequence[Entry], logs: Mapping[str, Sequence[Step]]
) -> ServiceTimes:
    """Of jobs that are done and were handed in together; `logs` has the steps of each, that of version 0 too."""
    job = entries[0].job
    limited = service.running if service.running < len(entries) else None
    ends = sorted(steps[-1].time for steps in logs.values())
    return ServiceTimes(
        jobs=tuple(_job(store, entry, logs[entry.job.id], ends if limited else ()) for entry in entries),
        steps=job.training.steps,
        groups_per_step=job.training.groups_per_step,
        alpha=job.staleness.alpha,
        running=limited,
        schedule=service.schedule,
    )


def _job(store: ObjectStore, entry: Entry, steps: Sequence[Step], ends: Sequence[float]) -> JobTimes:
    made, alternates = steps[1:], entry.job.staleness.alpha == 0
    groups = {str(g.uid): g for g in SampleBuffer(store, f"{entry.job.id}/").history(SEGMENTS) if g.tombstone is None}
    batches = [[_span(groups[uid]) for uid in step.trained] for step in made]
    began = [min(begin for begin, _ in batch) for batch in batches]
    ended = [max(end for _, end in batch) for batch in batches]
    place = max([end for end in ends if entry.started is not None and end <= entry.started], default=entry.submitted)
    under: dict[int, float] = {}
    """By version: when the first group began under it."""
    for group in groups.values():
        under[group.version] = min(_span(group)[0], under.get(group.version, math.inf))
    ready = [under[step.version] - step.time for step in made if step.version in under]
    return JobTimes(
        begins_s=began[0] - place,
        ready_s=max(LEAST_S, fmean(ready)) if ready else LEAST_S,
        group_s=fmean(end - begin for batch in batches for begin, end in batch),
        rollout_s=fmean(end - begin for begin, end in zip(began, ended, strict=True)),
        gather_s=_gather(made, ended, alternates),
        train_s=fmean(busy(step) for step in made),
        push_s=max(LEAST_S, fmean(step.time - step.metrics["span_train_end"] for step in made)),
    )


def _gather(made: Sequence[Step], ended: Sequence[float], alternates: bool) -> float:
    """With alpha the trainer may be busy when the batch is there, so only what was waited for is told."""
    waits = [step.metrics["span_queue_start"] - end for step, end in zip(made, ended, strict=True)]
    return max(0.0, fmean(waits) if alternates else min(waits))


def _span(group: Group) -> tuple[float, float]:
    """From the first reset to the last reward."""
    spans = [span for member in group.members for span in member.spans]
    return min(span.start for span in spans), max(span.end for span in spans)
