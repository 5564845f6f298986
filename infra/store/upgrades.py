"""Segments of an older major version, as rows of the present one.

Invariants: an upgrade is a pure function from the rows of one major version to those of the next, so that a chain of
them reads any that was ever written; segments themselves are never rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pyarrow as pa

Upgrade = Callable[[pa.Table], pa.Table]
UPGRADES: Mapping[int, Upgrade] = {}
"""From the rows of each older major version to those of the next one."""


def upgraded(rows: pa.Table, written: int, wanted: int) -> pa.Table:
    """All rows and columns of a segment of major version `written`, as `wanted` has them. Raises ArrowInvalid for a
    version that never was."""
    for major in range(written, wanted):
        if major not in UPGRADES:
            raise pa.ArrowInvalid(f"not a segment: there never was a schema version {major}")
        rows = UPGRADES[major](rows)
    return rows
