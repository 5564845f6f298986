"""Where a run keeps its files on this machine.

Invariants: everything local lies below one directory (`$ROLLMILL_HOME`, by default `.rollmill` in the current
directory) and can be deleted without loss: the truth is in the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infra.services.supervisor import default_data_dir
from rl.config.run import RunConfig


@dataclass(frozen=True)
class Home:
    """The local directory of Rollmill."""

    root: Path

    @classmethod
    def default(cls) -> Home:
        return cls(default_data_dir().resolve())

    @property
    def models(self) -> Path:
        """Materialised base models, by content."""
        return self.root / "models"

    @property
    def cache(self) -> Path:
        """Pulled directories, by checksum; shared by all processes of this machine."""
        return self.root / "cache"

    def run(self, config: RunConfig) -> Path:
        """Logs, resolved configuration, plots and report of one run."""
        return self.of(config.tenant, config.name)

    def of(self, tenant: str, name: str) -> Path:
        """The same, by the names. With a dash between them, tenant `a` with run `b-c` and tenant `a-b` with run `c`
        would have one directory; neither name has a dot."""
        return self.root / "runs" / f"{tenant}.{name}"
