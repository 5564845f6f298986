"""Alerts of a live run (`rl.alerts`): looked for at every new version, and told wherever somebody looks.

    progress (console and the flow's log) · MLflow (a tag `alert.{kind}` of the run) · Prefect (an artifact)

Invariants: told once when it begins and once when it is over; a place that does not answer costs its telling only.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

from flows.artifacts import Artifacts
from flows.evaluations import Evaluation, load_all
from infra.store.errors import StoreError
from infra.store.log import CommitLog
from infra.store.reader import LogReader
from infra.tracking.run import Tracker
from rl.alerts import Alert, HeldOut, Kind, Point, alerts, watched
from rl.config.run import RunConfig
from rl.records import Step
from rl.rollback import live_line

OVER = "over"


def alerts_of(config: RunConfig, steps: Iterable[Step], evaluations: Iterable[Evaluation]) -> list[Alert]:
    """What holds after these steps of the live line."""
    points = [Point(s.version, s.metrics) for s in steps if s.base is not None]
    by_version: dict[int, list[float]] = {}
    for evaluation in evaluations:
        by_version.setdefault(evaluation.version, []).append(evaluation.reward)
    held_out = [HeldOut(version, sum(rewards) / len(rewards)) for version, rewards in sorted(by_version.items())]
    return alerts(points, held_out, config.alerts.rules, [d.name for d in config.domains])


def _light(step: Step) -> Step:
    """What of a step is kept for as long as the run lives; whole ones would add up."""
    heavy = {"snapshot": None, "trained": (), "dropped": (), "segments": ()}
    return step.model_copy(update={**heavy, "metrics": watched(step.metrics)})


class Alarms:
    """Of one live run. Call `look` whenever there may be a new version."""

    def __init__(
        self, config: RunConfig, log: CommitLog, tracker: Tracker, artifacts: Artifacts, console: Console
    ) -> None:
        self._config, self._reader = config, LogReader(log.store, config.prefix)
        self._tracker, self._artifacts, self._console = tracker, artifacts, console
        self._line: list[Step] = []
        self._lsn = 0
        self._evaluations: dict[str, list[Evaluation]] = {}
        self.now: dict[Kind, Alert] = {}

    def look(self, lsn: int) -> None:
        """The log is at record `lsn`."""
        if lsn <= self._lsn:
            return
        try:
            records = [_light(r) if isinstance(r, Step) else r for r in self._reader.records(self._lsn + 1)]
            evaluations = load_all(self._config, self._reader.store, self._evaluations)
        except StoreError:
            return
        self._line = live_line(self._line, records)
        self._lsn += len(records)
        found = {alert.kind: alert for alert in alerts_of(self._config, self._line, evaluations)}
        begun = [alert for kind, alert in found.items() if kind not in self.now]
        over = [kind for kind in self.now if kind not in found]
        self.now = found
        for alert in begun:
            self._console.print(f"alert: {alert}", style="yellow", highlight=False, soft_wrap=True, markup=False)
            self._tracker.tag(f"alert.{alert.kind}", str(alert))
        for kind in over:
            self._console.print(f"alert over: {kind.replace('_', ' ')}", highlight=False, markup=False)
            self._tracker.tag(f"alert.{kind}", OVER)
        if begun or over:
            self._artifacts.alerts(list(found.values()))
