"""List columns of numbers between packed arrays and Arrow: the bulk of a segment, so without an object per element.

Invariant: `arrays(numbers(lists, code), code)` gives the same lists; None stays None.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import pyarrow as pa

_TYPES = {"B": pa.uint8(), "i": pa.int32(), "q": pa.int64(), "f": pa.float32()}


def numbers(lists: Sequence[Sequence[float] | None], code: str) -> pa.ListArray:
    """A list column of numbers of the format `code` (as in `array`: B, i, q or f)."""
    packed = [v if isinstance(v, array) and v.typecode == code else array(code, v or ()) for v in lists]
    offsets = [0, *accumulate(map(len, packed))]
    values = pa.Array.from_buffers(_TYPES[code], offsets[-1], [None, pa.py_buffer(b"".join(packed))])
    missing = [values is None for values in lists]
    mask = pa.array(missing, pa.bool_()) if any(missing) else None  # it costs as much as all the rest
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, mask=mask)


def arrays(column: pa.ChunkedArray, code: str) -> list[array | None]:
    """Packed arrays of the format `code` from a list column of numbers."""
    found: list[array | None] = []
    for chunk in column.chunks:
        values = chunk.values.to_numpy().astype(code, copy=False)
        offsets, valid = chunk.offsets.to_pylist(), chunk.is_valid().to_pylist()
        for i in range(len(chunk)):
            found.append(array(code, values[offsets[i] : offsets[i + 1]].tobytes()) if valid[i] else None)
    return found
