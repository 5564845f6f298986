"""Candidate encodings of a segment: size and CPU time, each beside the one in use (`infra.store.schema.ENCODING`).

Invariant: all candidates write the same tables; times are the least of several runs in turns, so that a busy machine
slows all alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import thread_time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.groups import make_group
from benchmarks.report import Figure
from infra.store import schema
from infra.store.schema import ENCODING, WIDE

TOKENS, LOGPROBS = WIDE[:2]
SPLIT = ENCODING["column_encoding"]
CANDIDATES: dict[str, Mapping[str, Any]] = {
    "in use": ENCODING,
    "pyarrow's defaults": {},
    "zstd on every column": {**ENCODING, "compression": "zstd"},
    "zstd level 9": {**ENCODING, "compression_level": dict.fromkeys(WIDE, 9)},
    "snappy": {**ENCODING, "compression": dict.fromkeys(WIDE, "snappy")},
    "lz4": {**ENCODING, "compression": dict.fromkeys(WIDE, "lz4")},
    "tokens in a dictionary": {
        **ENCODING,
        "use_dictionary": [*ENCODING["use_dictionary"], TOKENS],
        "column_encoding": {LOGPROBS: SPLIT[LOGPROBS]},
    },
    "tokens as deltas": {**ENCODING, "column_encoding": {**SPLIT, TOKENS: "DELTA_BINARY_PACKED"}},
    "tokens plain": {**ENCODING, "column_encoding": {LOGPROBS: SPLIT[LOGPROBS]}},
    "log-probs plain": {**ENCODING, "column_encoding": {TOKENS: SPLIT[TOKENS]}},
    "mask and versions plain": {**ENCODING, "use_dictionary": False},
    "nothing": {"compression": "none", "use_dictionary": False, "write_statistics": False},
}
GROUPS, ROUNDS = 16, 12


def main() -> list[Figure]:
    tables = [schema.table([make_group(ordinal)]) for ordinal in range(GROUPS)]
    write_s = dict.fromkeys(CANDIDATES, float("inf"))
    read_s, size = dict(write_s), dict.fromkeys(CANDIDATES, 0)
    for _ in range(ROUNDS):
        for name, encoding in CANDIDATES.items():
            begin = thread_time()
            bodies = [schema.write(table, encoding) for table in tables]
            middle = thread_time()
            for body in bodies:
                pq.ParquetFile(pa.BufferReader(body)).read(use_threads=False)
            write_s[name] = min(write_s[name], (middle - begin) / GROUPS)
            read_s[name] = min(read_s[name], (thread_time() - middle) / GROUPS)
            size[name] = sum(map(len, bodies)) // GROUPS
    print("| encoding | bytes per group | write, ms | read, ms |\n|---|---|---|---|")
    for name in CANDIDATES:
        print(f"| {name} | {size[name]:,} | {write_s[name] * 1e3:.2f} | {read_s[name] * 1e3:.2f} |")
    ours = size["in use"]
    return [Figure(f"size_{name.replace(' ', '_')}", n / ours, "of the size in use") for name, n in size.items()]
