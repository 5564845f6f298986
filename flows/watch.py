"""What is shown of a run while it trains: progress, alerts, links; on the console, in Prefect and in MLflow.

Invariant: it only reads, and whatever does not answer costs what it would have shown.
"""

from __future__ import annotations

import os
from typing import Any

from flows.alarms import Alarms
from flows.artifacts import Artifacts
from flows.progress import Progress
from flows.session import Session
from infra.store.buffer import SampleBuffer
from infra.tracking.run import Tracker
from infra.tracking.server import MlflowRun


class Watch:
    """Of one live session. Call `refresh` as often as one likes."""

    def __init__(self, session: Session) -> None:
        config, log = session.config, session.log
        self._session = session
        self._tracker = Tracker.start(config, "report")
        self._artifacts = Artifacts(config)
        self._alarms = Alarms(config, log, self._tracker, self._artifacts, session.console)
        buffer = SampleBuffer(log.store, config.prefix)
        self._progress = Progress(config, log, session.proxy, session.client, session.console, buffer)

    def __enter__(self) -> Watch:
        self._artifacts.links(lambda: pages(self._session))
        self._progress.__enter__()
        return self

    def __exit__(self, *exit: Any) -> None:
        self._progress.__exit__(*exit)
        self._tracker.close(self._session.config.deadlines.control)

    def refresh(self) -> None:
        ledger = self._session.log.ledger
        self._alarms.look(ledger.lsn)
        alerts = list(self._alarms.now.values())
        self._progress.refresh(alerts)
        share = (ledger.head or 0) / self._session.config.training.steps
        self._artifacts.progress(share, self._progress.cells, alerts)


def pages(session: Session) -> dict[str, str]:
    """Where else one may look."""
    config = session.config
    found = {"Dask dashboard (what runs on which worker)": session.client.dashboard_link}
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if uri is not None and config.tracking.enabled:
        found["MLflow: figures, versions and traces"] = MlflowRun(config, uri, owner=False).page()
    return {what: address for what, address in found.items() if address}
