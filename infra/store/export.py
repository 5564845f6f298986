"""Samples as one file for other programs: one row per trajectory, with the columns of the segment schema and what
became of it.

Invariant: a file appears whole, under its name, or not at all; a bounded number of groups is in memory.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from infra.store import schema
from infra.store.browse import Sample

FATE = (pa.field("fate", pa.string()), pa.field("drop_reason", pa.string()), pa.field("trained_version", pa.int64()))
SCHEMA = pa.schema([*schema.SCHEMA, *FATE])
"""`fate` is trained, dropped, open or copy (see `infra.store.browse.State`)."""


def write_samples(samples: Iterable[Sample], to: Path) -> tuple[int, int]:
    """Write `to`, whose suffix is in FORMATS, replacing what is there; how many groups and trajectories."""
    groups = rows = 0
    with tempfile.NamedTemporaryFile(dir=to.parent, prefix=f".{to.name}-", delete=False) as draft:
        path = Path(draft.name)
    try:
        with FORMATS[to.suffix](path) as file:
            for sample in samples:
                file.write(_table(sample))
                groups, rows = groups + 1, rows + len(sample.group.members)
        path.chmod(0o644)
        path.replace(to)
    finally:
        path.unlink(missing_ok=True)
    return groups, rows


def _table(sample: Sample) -> pa.Table:
    table, fate = schema.table([sample.group]), sample.fate
    for field, value in zip(FATE, (fate.state.value, fate.reason or None, fate.version), strict=True):
        table = table.append_column(field, pa.array([value] * table.num_rows, field.type))
    return table


class _Parquet:
    """Row groups of `ROWS` trajectories at least."""

    ROWS = 512

    def __init__(self, path: Path) -> None:
        self._file = pq.ParquetWriter(path, SCHEMA, compression="zstd")
        self._held: list[pa.Table] = []

    def __enter__(self) -> _Parquet:
        return self

    def write(self, table: pa.Table) -> None:
        self._held.append(table)
        if sum(held.num_rows for held in self._held) >= self.ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            self._file.write_table(pa.concat_tables(self._held))
            self._held.clear()

    def __exit__(self, *_: Any) -> None:
        self._flush()
        self._file.close()


class _Lines:
    """One JSON object per line; `info` as an object, not as text."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def __enter__(self) -> _Lines:
        return self

    def write(self, table: pa.Table) -> None:
        for row in table.to_pylist():
            row["info"] = row["info"] and json.loads(row["info"])
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def __exit__(self, *_: Any) -> None:
        self._file.close()


FORMATS: dict[str, type[_Parquet] | type[_Lines]] = {".parquet": _Parquet, ".jsonl": _Lines}
