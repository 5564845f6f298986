"""What is shown of a run while it trains: progress, alerts, links; on the console, in Prefect and in MLflow.

Invariant: it only reads, and whatever does not answer costs what it would have shown.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from flows.alarms import Alarms
from flows.artifacts import Artifacts
from flows.progress import Progress
from flows.session import Session
from infra.store.buffer import SampleBuffer
from infra.tracking.run import Tracker
from infra.tracking.server import MlflowRun
from rl.errors import RollmillError


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
        if exit[0] is None:
            with suppress(RollmillError):
                self.refresh(last=True)
        self._progress.__exit__(*exit)
        self._tracker.close(self._session.config.deadlines.control)

    def refresh(self, last: bool = False) -> None:
        """`last`: however lately it was looked, so that what is shown at the end is the end."""
        ledger = self._session.log.ledger
        self._alarms.look(ledger.lsn)
        alerts = list(self._alarms.now.values())
        self._progress.refresh(alerts, last)
        share = (ledger.head or 0) / self._session.config.training.steps
        self._artifacts.progress(share, self._progress.cells, alerts, last)


def pages(session: Session) -> dict[str, str]:
    """Where else one may look."""
    config = session.config
    found = {"Dask dashboard (what runs on which worker)": session.client.dashboard_link}
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if uri is not None and config.tracking.enabled:
        found["MLflow: figures, versions and traces"] = MlflowRun(config, uri, owner=False).page()
    return {what: address for what, address in found.items() if address}
