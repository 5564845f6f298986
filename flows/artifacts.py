"""What Prefect's UI shows of a run beside its flow and task runs: artifacts, one of each kind, renewed in place.

    progress-{run}   how far it is, what is in which stage, tokens per second, time left; while it trains
    links-{run}      its pages in MLflow and on the Dask dashboard
    alerts-{run}     what calls for a look, if anything does
    versions-{run}   the table of versions
    report-{run}     figures, reward curve and timeline, at the end

Invariant: shown, never relied on: a server that does not answer costs the artifact, not the run; outside of a flow run
there are none.
"""

from __future__ import annotations

import base64
import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.context import FlowRunContext

from flows.told import ask
from rl.alerts import Alert
from rl.config.run import RunConfig

EVERY_S = 5.0
"""Between two updates of the progress."""


class Artifacts:
    """Of one run, in the flow run of this thread."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._name = f"{config.tenant}-{config.name}".replace("_", "-")
        self._shown = FlowRunContext.get() is not None
        self._progress: UUID | None = None
        self._told = -EVERY_S

    def progress(
        self, share: float, cells: Sequence[tuple[str, str]], alerts: Sequence[Alert] = (), last: bool = False
    ) -> None:
        """How far it is (0 to 1), with what the console's progress says; at most every `EVERY_S` seconds, and when it
        is the `last`."""
        if not self._shown or (monotonic() - self._told < EVERY_S and not last):
            return
        self._told = monotonic()
        said = ", ".join(f"{name} {value}" for name, value in cells if name != "alerts")
        said += "".join(f" **Alert: {alert}**" for alert in alerts)
        if self._progress is None:
            key = f"progress-{self._name}"
            self._progress = ask(lambda: _id(create_progress_artifact(100 * share, key=key, description=said)))
        else:
            made = self._progress
            ask(lambda: update_progress_artifact(made, progress=100 * share, description=said))

    def links(self, pages: Callable[[], Mapping[str, str]]) -> None:
        """Addresses by what is there. Returns at once: `pages` may have to ask for them."""

        def show() -> None:
            text = f"# {self._config.tenant}/{self._config.name}\n\n"
            text += "".join(f"- [{what}]({address})\n" for what, address in pages().items())
            self._markdown("links", text, "where else to look")

        context = contextvars.copy_context()  # which flow run this is
        threading.Thread(target=context.run, args=(show,), name="artifacts", daemon=True).start()

    def alerts(self, found: Sequence[Alert]) -> None:
        text = "".join(f"- **{a.kind.replace('_', ' ')}** (version {a.version}): {a.what}\n" for a in found)
        self._markdown("alerts", text or "Nothing calls for a look any more.\n", "what calls for a look")

    def versions(self, rows: Sequence[Mapping[str, str]]) -> None:
        if self._shown:
            table, key = [dict(row) for row in rows], f"versions-{self._name}"
            ask(lambda: create_table_artifact(table, key=key, description="every version of the run"))

    def report(self, figures: Mapping[str, float], pictures: Mapping[str, Path], more: str) -> None:
        """The end of a run: its figures as a table, its pictures in place."""
        rows = "\n".join(f"| {name} | {value:.4g} |" for name, value in figures.items())
        shown = "\n\n".join(f"## {what}\n\n![{what}]({_inline(path)})" for what, path in pictures.items())
        text = f"# {self._config.tenant}/{self._config.name}\n\n{shown}\n\n## Figures\n\n"
        text += f"| figure | value |\n|---|---|\n{rows}\n\n{more}"
        self._markdown("report", text, "what the run learned")

    def _markdown(self, kind: str, text: str, description: str) -> None:
        if self._shown:
            ask(lambda: create_markdown_artifact(text, key=f"{kind}-{self._name}", description=description))


def _id(made: object) -> UUID:
    assert isinstance(made, UUID)  # typed as for asynchronous callers, too
    return made


def _inline(picture: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
