"""The names of the metrics in MLflow, with unit and meaning, and how a step record's figures map to them.

Invariant: a projection. Everything here is a function of `rl.records.Step.metrics`, so whatever MLflow lost is
logged again from the commit log.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One metric; `key` is its name among the figures of a step record."""

    name: str
    key: str
    unit: str
    meaning: str


METRICS = (
    Metric("reward/mean", "reward", "reward", "per trajectory looked at, those of groups without signal included"),
    Metric("reward/trained", "reward_trained", "reward", "per trajectory trained"),
    Metric("offpolicy/lag_mean", "lag_mean", "versions", "mean lag of the trained groups"),
    Metric("offpolicy/lag_max", "lag_max", "versions", "largest lag of the trained groups; never above alpha"),
    Metric("offpolicy/dropped", "dropped", "attempts", "dropped since the step before"),
    Metric("offpolicy/mismatch_kl", "mismatch_kl", "nats", "KL(behaviour || proximal) per token, k3 estimator"),
    Metric("offpolicy/mismatch_kl_k1", "mismatch_kl_k1", "nats", "the same, k1 estimator"),
    Metric("offpolicy/ess", "ess", "share", "effective sample size of the importance ratios over the tokens"),
    Metric("offpolicy/ratio_mean", "ratio_mean", "ratio", "importance ratio before the cap"),
    Metric("offpolicy/ratio_max", "ratio_max", "ratio", "its largest value"),
    Metric("offpolicy/capped_fraction", "capped_fraction", "share", "tokens whose ratio was cut"),
    Metric("offpolicy/logprob_gap_max", "logprob_gap_max", "nats", "largest |proximal - behaviour|"),
    Metric("offpolicy/fresh_gap_max", "fresh_gap_max", "nats", "the same under one version: numerics alone"),
    Metric("policy/entropy", "entropy", "nats", "per sampled token"),
    Metric("policy/kl", "kl", "nats", "per token, to the reference policy"),
    Metric("policy/clip_fraction", "clip_fraction", "share", "tokens whose gradient was clipped"),
    Metric("optimizer/loss", "loss", "1", "of the window"),
    Metric("optimizer/grad_norm", "grad_norm", "1", "before clipping"),
    Metric("optimizer/learning_rate", "learning_rate", "1", "of this step"),
    Metric("rollout/turns", "turns", "turns", "mean per trajectory"),
    Metric("rollout/truncated", "truncated", "share", "trajectories that a limit ended"),
    Metric("rollout/retries", "retries", "tries", "failed tries per trajectory, before the one trained"),
    Metric("rollout/idle", "rollout_idle", "share", "time in which not one generation ran"),
    Metric("batch/groups", "groups", "groups", "trained"),
    Metric("batch/trajectories", "trajectories", "trajectories", "looked at, those without signal included"),
    Metric("batch/tokens", "tokens", "tokens", "sampled tokens trained"),
    Metric("time/wait", "wait_s", "s", "the trainer waited for a batch"),
    Metric("time/weight_sync", "swap_s", "s", "suspend, update and resume of the engines"),
    Metric("time/train", "train_s", "s", "forward, backward and optimizer"),
    Metric("time/stall", "stall_s", "s", "training held up by publishing the version, which goes on beside it"),
    Metric("time/push", "push_s", "s", "saving and upload of the version's state"),
    Metric("time/idle", "idle", "share", "of the step, in which the trainer waited for a batch"),
    Metric("time/tokens_per_s", "tokens_per_s", "tokens/s", "trained, over the whole step"),
)
"""All metrics of fixed name. Beside them `reward/part/{name}`, `offpolicy/dropped/{reason}`, and `other/{key}`
for figures that have no name here."""

_NAMES = {metric.key: metric.name for metric in METRICS}
_PREFIXES = {"reward/": "reward/part/", "dropped_": "offpolicy/dropped/"}


def project(figures: Mapping[str, float]) -> dict[str, float]:
    """The figures of a step record under their MLflow names; those that are not finite, and the times of day
    (`span_*`, which the timeline shows), are left out."""
    named = {}
    for key, value in figures.items():
        if math.isfinite(value) and not key.startswith("span_"):
            named[_name(key)] = float(value)
    return named


def _name(key: str) -> str:
    if key in _NAMES:
        return _NAMES[key]
    for start, prefix in _PREFIXES.items():
        if key.startswith(start):
            return prefix + key.removeprefix(start)
    return f"other/{key}"
