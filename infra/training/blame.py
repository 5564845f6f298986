"""Whose turn it was when a trainer died: a tenant whose updates kill the process must not end the others' for good.

    trainer-{n}.turn   {"turn": "acme/job" or null, "strikes": {"acme/job": 1}}

Invariants: the file is replaced as a whole; a turn that ends takes its tenant's strikes back; the next process on this
machine finds a turn that never ended, and counts it. One thread's.
"""

from __future__ import annotations

import json
from pathlib import Path


class Blame:
    """Of one trainer's processes, one after another."""

    def __init__(self, file: Path) -> None:
        """Reads what the process before left."""
        self._file = file
        self.strikes: dict[str, int] = {}
        """Deaths in a row, in turns of the tenant."""
        try:
            found = json.loads(file.read_text())
            self.strikes = {str(tenant): int(count) for tenant, count in found["strikes"].items()}
            died_in = found["turn"]
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return
        if died_in is not None:
            self.strikes[died_in] = self.strikes.get(died_in, 0) + 1
        self._write(None)

    def begin(self, tenant: str) -> None:
        """The turn of this tenant begins."""
        self._write(tenant)

    def end(self, tenant: str) -> None:
        """It ended, and the process is alive."""
        self.strikes.pop(tenant, None)
        self._write(None)

    def _write(self, turn: str | None) -> None:
        draft = self._file.with_suffix(".draft")
        draft.write_text(json.dumps({"turn": turn, "strikes": self.strikes}))
        draft.replace(self._file)
