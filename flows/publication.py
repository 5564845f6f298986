"""Where a report goes: to MLflow, and to Prefect's UI as artifacts.

Invariant: both are projections; a server that does not answer costs what it would have shown.
"""

from __future__ import annotations

from flows.artifacts import Artifacts
from flows.report import Report, records_of
from infra.store.objects import ObjectStore
from infra.tracking.plots import version_rows
from infra.tracking.run import Tracker
from rl.config.run import RunConfig
from rl.records import Step


def publish(config: RunConfig, store: ObjectStore, report: Report) -> None:
    """The report's pictures and tables; and to MLflow whatever of the log it missed."""
    records = records_of(config, store)
    head = max(record.version for record in records if isinstance(record, Step))
    tracker = Tracker.start(config, "report")
    for path in report.files:
        tracker.log_artifact(path)
    if "rollout_idle" in report.figures:
        tracker.log_step(head, {"rollout_idle": report.figures["rollout_idle"]})
    tracker.rebuild(records)  # last: of a long run it takes longest, and the time is bounded
    tracker.close(config.deadlines.control)
    artifacts = Artifacts(config)
    artifacts.versions(version_rows(records))
    pictures = {"Reward": report.reward_png, "Who was busy when": report.timeline_png}
    note = f"To look closer at the timeline: {report.timeline_html.name}, among the run's artifacts in MLflow."
    artifacts.report(report.figures, pictures, note)
