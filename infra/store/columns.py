"""Columns between Python and Arrow, without an object per element where it can be avoided: the numbers of tokens, which
are the bulk of a segment, go as packed arrays.

Invariant: `arrays(numbers(lists, code), code)` gives the same lists; None stays None.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import pyarrow as pa

_TYPES = {"B": pa.uint8(), "i": pa.int32(), "q": pa.int64(), "f": pa.float32()}
_LISTS = {code: pa.list_(kind) for code, kind in _TYPES.items()}


def numbers(lists: Sequence[Sequence[float] | None], code: str) -> pa.ListArray:
    """A list column of numbers of the format `code` (as in `array`: B, i, q or f)."""
    packed = [v if isinstance(v, array) and v.typecode == code else array(code, v or ()) for v in lists]
    offsets = array("i", accumulate(map(len, packed), initial=0))
    values = pa.Array.from_buffers(_TYPES[code], offsets[-1], [None, pa.py_buffer(b"".join(packed))])
    if None in lists:
        missing = pa.array([some is None for some in lists], pa.bool_())
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, mask=missing)
    return pa.Array.from_buffers(_LISTS[code], len(packed), [None, pa.py_buffer(offsets)], children=[values])


def arrays(column: pa.ChunkedArray, code: str) -> list[array | None]:
    """Packed arrays of the format `code` from a list column of numbers."""
    found: list[array | None] = []
    for chunk in column.chunks:
        values = chunk.values.to_numpy().astype(code, copy=False)
        found += [None if at is None else array(code, values[at].tobytes()) for at in _places(chunk)]
    return found


def _places(chunk: pa.ListArray) -> list[slice | None]:
    """Where each list lies among the values."""
    offsets = chunk.offsets.to_pylist()
    if not chunk.null_count:
        return list(map(slice, offsets, offsets[1:]))
    valid = chunk.is_valid().to_pylist()
    return [slice(offsets[i], offsets[i + 1]) if valid[i] else None for i in range(len(chunk))]
