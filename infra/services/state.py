"""The supervisor's memory, `<data_dir>/services.json`: what runs, and on which ports it ran last.

Invariants: written atomically and only under the supervisor's lock; a process is recorded before it is
waited for, so a supervisor that dies in the middle leaves nothing that `down` can not find. Ports outlive
`down`, so that the next `up` answers at the same addresses.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infra.services.errors import StateUnreadable
from infra.services.processes import Identity


@dataclass
class Record:
    """One service as last started. `identity` is None after `down`."""

    port: int
    inner: dict[str, int] = field(default_factory=dict)
    """Ports that only the service itself uses, by the name of their flag."""
    identity: Identity | None = None
    started_at: float | None = None
    """Seconds since the epoch."""


def state_path(data_dir: Path) -> Path:
    return data_dir / "services.json"


def log_path(data_dir: Path, name: str) -> Path:
    return data_dir / "logs" / f"{name}.log"


def load(data_dir: Path) -> dict[str, Record]:
    """The records by service name; empty if there was never an `up` here. Raises StateUnreadable."""
    path = state_path(data_dir)
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StateUnreadable(path, str(error)) from error
    try:
        return {
            name: Record(
                port=int(item["port"]),
                inner={key: int(port) for key, port in item["inner"].items()},
                identity=_identity(item["identity"]),
                started_at=item["started_at"],
            )
            for name, item in raw["services"].items()
        }
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise StateUnreadable(path, f"{type(error).__name__}: {error}") from error


def _identity(kept: dict[str, Any] | None) -> Identity | None:
    """What an earlier version wrote has the clock's time: such a service is found by its mark."""
    return None if kept is None or "create_time" in kept else Identity(**kept)


def save(data_dir: Path, records: dict[str, Record]) -> None:
    """Replace the state file in one step."""
    path = state_path(data_dir)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps({"services": {name: asdict(r) for name, r in records.items()}}, indent=1))
    os.replace(draft, path)
