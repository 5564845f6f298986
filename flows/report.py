"""The end of a run: what it learned, as tables, pictures and one JSON file.

Invariant: made from the store alone, so that it can be made again, of any run, at any time.
"""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from flows.evaluations import load_all
from infra.store.buffer import SampleBuffer
from infra.store.objects import ObjectStore
from infra.store.reader import LogReader
from infra.tracking.page import timeline_page
from infra.tracking.plots import Lane, idle_ratio, reward_curve, timeline, versions_table
from rl.config.run import RunConfig
from rl.errors import ConfigError
from rl.records import Record, Step
from rl.trajectory import Span

TIMELINE_GROUPS = 400
"""Newest groups in the picture: a long run's would be a grey block."""
TRAINER_SPANS = dict(wait="wait", queue="wait", swap="swap", restore="restore", train="train", push="push")
"""What the trainer did, by the phase of a step; in the queue of a service it waits for other tenants."""


@dataclass(frozen=True)
class Report:
    figures: dict[str, float]
    table: str
    reward_png: Path
    timeline_png: Path
    timeline_html: Path
    json_path: Path

    @property
    def files(self) -> tuple[Path, ...]:
        """All of it, the JSON last."""
        return self.reward_png, self.timeline_png, self.timeline_html, self.json_path


def write_report(
    config: RunConfig, store: ObjectStore, directory: Path, name: str, wall_s: float | None = None
) -> Report:
    """Read the run from the store and write `reward.png`, `timeline.png`, `timeline.html` and `report.json` into
    `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    records = records_of(config, store)
    steps = [r for r in records if isinstance(r, Step)]
    evaluations = load_all(config, store)
    figures = _figures(config, steps, evaluations, wall_s)
    reward_png, timeline_png, timeline_html, json_path = (
        directory / f for f in ("reward.png", "timeline.png", "timeline.html", "report.json")
    )
    reward_curve(steps, [(e.version, e.domain, e.reward) for e in evaluations], reward_png)
    lanes = _lanes(config, store, steps)
    timeline(lanes, timeline_png)
    timeline_page(lanes, f"{config.tenant}/{config.name}, {config.staleness.mode}", timeline_html)
    figures |= _idle(lanes)
    payload = {
        "benchmark": name,
        "figures": [{"name": k, "value": v, "unit": _unit(k), "goal": None, "met": None} for k, v in figures.items()],
        "machine": {"system": platform.platform(), "python": platform.python_version()},
        "run": f"{config.tenant}/{config.name}",
        "seed": config.seed,
    }
    json_path.write_text(json.dumps(payload, indent=2))
    return Report(figures, versions_table(records), reward_png, timeline_png, timeline_html, json_path)


def _figures(config: RunConfig, steps: list[Step], evaluations: list[Any], wall_s: float | None) -> dict[str, float]:
    trained = [s for s in steps if s.base is not None]
    rewards = [s.metrics["reward"] for s in trained if "reward" in s.metrics]
    fifth = max(1, len(rewards) // 5)
    figures: dict[str, float] = {}
    by_version: dict[int, list[float]] = {}
    for e in evaluations:
        by_version.setdefault(e.version, []).append(e.reward)
    if by_version:
        figures["heldout_reward_before"] = fmean(by_version[min(by_version)])
        figures["heldout_reward_after"] = fmean(by_version[max(by_version)])
    if rewards:
        figures["train_reward_first_fifth"] = fmean(rewards[:fifth])
        figures["train_reward_last_fifth"] = fmean(rewards[-fifth:])
    figures["lag_max"] = max((s.metrics.get("lag_max", 0.0) for s in trained), default=0.0)
    figures["versions"] = float(len(steps))
    figures["trajectories"] = sum(s.metrics.get("trajectories", 0.0) for s in trained)
    figures["trained_trajectories"] = float(sum(len(s.trained) for s in trained) * config.training.group_size)
    if wall_s is not None:
        figures["wall_s"] = wall_s
    return figures


def _lanes(config: RunConfig, store: ObjectStore, steps: list[Step]) -> list[Lane]:
    trainer = [
        Span(kind, s.metrics[f"span_{phase}_start"], s.metrics[f"span_{phase}_end"])
        for s in steps
        for phase, kind in TRAINER_SPANS.items()
        if f"span_{phase}_start" in s.metrics
    ]
    groups = SampleBuffer(store, config.prefix).history(TIMELINE_GROUPS)
    spans = [span for group in groups for member in group.members for span in member.spans]
    begin = min((s.start for s in spans), default=0.0)
    lanes = [Lane("trainer", [s for s in trainer if s.end >= begin])]
    for stage in ("generate", "environment", "reset", "score"):
        lanes.append(Lane(stage, [s for s in spans if s.stage == stage]))
    return lanes


def _idle(lanes: list[Lane]) -> dict[str, float]:
    """Share of the pictured time in which no generation ran, and in which the trainer did nothing but wait."""
    by_name = {lane.name: lane.spans for lane in lanes}
    trainer = [s for s in by_name["trainer"] if s.stage != "wait"]
    both = [*trainer, *by_name["generate"]]
    if not both:
        return {}
    begin, end = min(s.start for s in both), max(s.end for s in both)
    return {
        "rollout_idle": idle_ratio(by_name["generate"], begin, end),
        "trainer_idle": idle_ratio(trainer, begin, end),
    }


def _unit(name: str) -> str:
    if name.endswith("_s"):
        return "s"
    if name.endswith("_idle"):
        return "share"
    return "reward" if "reward" in name else "count"


def records_of(config: RunConfig, store: ObjectStore) -> list[Record]:
    """The whole log of a run. Raises ConfigError when there is none."""
    records = LogReader(store, config.prefix).history()
    if not records:
        raise no_version(config, store)
    return records


def no_version(config: RunConfig, store: ObjectStore) -> ConfigError:
    """What a command that looks at a run says of one that is not there."""
    return ConfigError(f"run {config.prefix.rstrip('/')!r} has no version yet in bucket {store.bucket!r}")
