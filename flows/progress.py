"""Live progress of a run: one table, from the scheduler's own counts, the log and the proxy.

Invariant: it only reads, and a source that does not answer leaves its cells as they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from distributed import Client
from rich.console import Console
from rich.live import Live
from rich.table import Table

from infra.proxy.client import ControlClient
from infra.store.buffer import SampleBuffer
from infra.store.errors import StoreError
from infra.store.log import CommitLog
from rl.alerts import Alert
from rl.config.run import RunConfig
from rl.errors import RollmillError
from rl.records import Step

LINE_EVERY_S = 10.0
"""Between two lines where the output is not a terminal."""
STAGES = ("reset", "interact", "score", "admit")


@dataclass
class Progress:
    """Call `refresh` as often as one likes; it looks once a second, and at the `last` call."""

    config: RunConfig
    log: CommitLog
    proxy: ControlClient
    client: Client
    console: Console
    buffer: SampleBuffer
    _stages: dict[str, int] = field(default_factory=dict)
    _filled: int = 0
    _step: Step | None = None
    _begun: tuple[float, int] | None = None
    _tokens: tuple[float, float] = (0.0, 0.0)
    _tokens_per_s: float = 0.0
    _serving: int | None = None
    _looked: float = 0.0
    _printed: float = 0.0
    _live: Live | None = None
    _alerts: Sequence[Alert] = ()

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live = Live(self._table(), console=self.console, refresh_per_second=2, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *exit: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*exit)

    def refresh(self, alerts: Sequence[Alert] = (), last: bool = False) -> None:
        now = monotonic()
        self._alerts = alerts
        if now - self._looked < 1.0 and not last:
            return
        self._looked = now
        self._look(now)
        if self._live is not None:
            self._live.update(self._table())
        elif now - self._printed >= LINE_EVERY_S or last:
            self._printed = now
            self.console.print("  ".join(f"{name} {value}" for name, value in self.cells), soft_wrap=True)

    def _look(self, now: float) -> None:
        ledger = self.log.sync()
        if ledger.head is not None:
            if self._begun is None:
                self._begun = (now, ledger.head)
            if self._step is None or self._step.version != ledger.head:
                self._step = next(
                    (
                        r
                        for r in self.log.records(ledger.lsn - 3 if ledger.lsn > 3 else 1)
                        if isinstance(r, Step) and r.version == ledger.head
                    ),
                    self._step,
                )
        try:
            status = self.proxy.status(deadline_s=1.0)
            self._serving = status.serving
            tokens = float(status.engine.get("tokens_generated", 0))
            before, at = self._tokens
            if tokens > before:
                self._tokens_per_s = (tokens - before) / max(1e-6, now - at)
            self._tokens = (tokens, now)
        except RollmillError:
            pass
        with suppress(StoreError):
            sealed = self.buffer.refresh(ledger, self.config.policy)
            self._filled = sum(c.tombstone is None for c in sealed)
        with suppress(OSError):
            self._stages = self.client.run_on_scheduler(count_stages)

    @property
    def cells(self) -> list[tuple[str, str]]:
        """What there is to say, by name."""
        head = self.log.ledger.head
        metrics = self._step.metrics if self._step else {}
        return [
            ("version", f"{head if head is not None else '-'}/{self.config.training.steps}"),
            ("serving", str(self._serving if self._serving is not None else "-")),
            *((stage, str(self._stages.get(stage, 0))) for stage in STAGES),
            ("buffer", f"{self._filled}/{self.config.policy.buffer_groups}"),
            ("trained groups", str(self.log.ledger.trained_groups)),
            (
                "dropped",
                ", ".join(f"{n} {k}" for k, n in sorted(self.log.ledger.dropped_groups.items())) or "0",
            ),
            ("lag", f"{metrics.get('lag_max', 0):.0f}"),
            ("reward", f"{metrics['reward']:.3f}" if "reward" in metrics else "-"),
            ("tokens/s", f"{self._tokens_per_s:.0f}"),
            ("left", self._eta()),
            *((("alerts", ", ".join(a.kind.replace("_", " ") for a in self._alerts)),) if self._alerts else ()),
        ]

    def _eta(self) -> str:
        head = self.log.ledger.head
        if self._begun is None or head is None or head <= self._begun[1]:
            return "-"
        per_step = (monotonic() - self._begun[0]) / (head - self._begun[1])
        seconds = round(per_step * (self.config.training.steps - head))
        return f"{seconds // 60}:{seconds % 60:02d}"

    def _table(self) -> Table:
        table = Table(title=f"{self.config.tenant}/{self.config.name}")
        cells = self.cells
        for name, _ in cells:
            table.add_column(name, justify="right")
        table.add_row(*(value for _, value in cells))
        return table


def count_stages(dask_scheduler: Any) -> dict[str, int]:
    """Runs on the scheduler: tasks of each stage that wait or run."""
    counts: Counter[str] = Counter()
    for name in STAGES:
        prefix = dask_scheduler.task_prefixes.get(name)
        if prefix is not None:
            states = prefix.states
            counts[name] = sum(states.get(s, 0) for s in ("waiting", "processing", "queued", "no-worker"))
    return dict(counts)
