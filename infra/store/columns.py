"""List columns of numbers between Python and Arrow: the bulk of a segment, so done without an object per element.

Invariant: `lists_of(numbers(lists, code, name))` gives the same lists; None stays None.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

_TYPES = {"B": pa.uint8(), "i": pa.int32(), "q": pa.int64(), "f": pa.float32()}


def numbers(lists: Sequence[Sequence[float] | None], code: str, name: str) -> pa.ListArray:
    """A list column of numbers of the format `code` (as in `struct`: B, i, q or f).

    Raises ValueError, with the column's `name`, for a number that the format can not hold.
    """
    try:
        packed = [struct.pack(f"{len(values)}{code}", *values) for values in lists if values]
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{name}: {error}") from error
    offsets = np.cumsum([0, *(len(values or ()) for values in lists)], dtype=np.int32)
    values = pa.Array.from_buffers(_TYPES[code], int(offsets[-1]), [None, pa.py_buffer(b"".join(packed))])
    missing = pa.array([values is None for values in lists], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=missing)


def lists_of(column: pa.ChunkedArray) -> list[list[Any] | None]:
    """Python lists from a list column of numbers."""
    found: list[list[Any] | None] = []
    for chunk in column.chunks:
        values, offsets = chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_pylist()
        valid = chunk.is_valid().to_pylist()
        found += [values[offsets[i] : offsets[i + 1]].tolist() if valid[i] else None for i in range(len(chunk))]
    return found
