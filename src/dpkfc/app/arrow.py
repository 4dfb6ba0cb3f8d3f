"""Numbers from NumPy to pyarrow and back, without pandas, which pyarrow itself would import."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def to_arrow(numbers: np.ndarray, missing: np.ndarray | None = None) -> pa.Array:
    """Return numbers `[N]` as an array of the same type, with nulls where `missing` is true."""
    numbers = np.ascontiguousarray(numbers)
    known = None
    if missing is not None:
        known = pa.py_buffer(np.packbits(~missing, bitorder="little"))
    kind = pa.from_numpy_dtype(numbers.dtype)
    return pa.Array.from_buffers(kind, len(numbers), [known, pa.py_buffer(numbers)])


def to_numpy(numbers: pa.Array) -> np.ndarray:
    """Return a copy of integers or floats `[N]`; a null becomes NaN (integers hold none)."""
    known, values = numbers.buffers()
    kind = numbers.type.to_pandas_dtype()
    if not len(numbers) or values is None:
        return np.zeros(len(numbers), kind)
    places = slice(numbers.offset, numbers.offset + len(numbers))
    copy = np.frombuffer(values, kind)[places].copy()
    if known is not None:
        is_known = np.unpackbits(np.frombuffer(known, np.uint8), bitorder="little")[places]
        copy[is_known == 0] = np.nan
    return copy
