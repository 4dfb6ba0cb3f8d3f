"""Rows without private data: drawn to the types and shapes of one record, with numbers of a fixed seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["PublicRows", "public_rows"]

_SEED = 20261125


@dataclass(frozen=True)
class PublicRows:
    """Records that are public, and how batches are made of them.

    Attributes:
        records: the records.
        collate: list of records to a batch.
        longer: records whose leading axes differ in length from each other, or none where records have no such axis.
    """

    records: Sequence[Any]
    collate: Callable[[list[Any]], Any]
    longer: Sequence[Any] = ()

    def __len__(self) -> int:
        return len(self.records)

    def batch(self, chosen: Sequence[int]) -> Any:
        """Return a batch of the chosen records."""
        return self.collate([self.records[i] for i in chosen])


def public_rows(record: Any, count: int, collate: Callable[[list[Any]], Any], integers: str = "bits") -> PublicRows:
    """Draw records with the types and shapes of one record.

    Args:
        record: one record of a dataset. Types and shapes are read, values are not.
        count: records to draw.
        collate: list of records to a batch.
        integers: what to draw for integers: "tokens" for 0 to 3 inside of sequences and 0 or 1 elsewhere, "bits" for 0 or 1
            everywhere, which nearly all labels and tokens may be, or "ones".

    Returns:
        The records; floating-point numbers are standard normal.

    Raises:
        TypeError: a record with a value of a type that cannot be drawn, by name.
    """
    generator = np.random.default_rng(_SEED)
    records = [_drawn_like(record, generator, integers, None) for _ in range(count)]
    lengths = _lengths(record)
    longer: list[Any] = []
    if len(lengths) == 1:
        base = lengths.pop()
        for length in (max(1, base // 2), base + 3, max(1, base // 3)):
            longer.append(_drawn_like(record, generator, integers, length))
    return PublicRows(records, collate, longer)


def _lengths(record: Any) -> set[int]:
    """Return the lengths of the leading axes of the sequences in a record."""
    if isinstance(record, (Tensor, np.ndarray)):
        return {int(record.shape[0])} if record.ndim in (1, 2) and record.shape[0] > 1 else set()
    if isinstance(record, Mapping):
        return set[int]().union(*(_lengths(x) for x in record.values()))
    if isinstance(record, (list, tuple)):
        if isinstance(record, list) and record and all(isinstance(x, (int, float)) for x in record):
            return {len(record)}
        return set[int]().union(*(_lengths(x) for x in record))
    return set()


def _drawn_like(x: Any, generator: np.random.Generator, integers: str, length: int | None) -> Any:
    """Return a random value of the type of x; sequences have `length` entries where that is given."""
    if isinstance(x, Tensor):
        shape = list(x.shape)
        if length is not None and x.dim() in (1, 2) and shape[0] > 1:
            shape[0] = length
        return _tensor_like(x, shape, generator, integers)
    if isinstance(x, np.ndarray):
        return _drawn_like(torch.from_numpy(np.ascontiguousarray(x)), generator, integers, length).numpy()
    if isinstance(x, np.generic):
        return type(x)(_number(x.dtype.kind, generator, integers))
    if isinstance(x, bool):
        return bool(generator.integers(2))
    if isinstance(x, int):
        return int(_number("i", generator, integers))
    if isinstance(x, float):
        return float(generator.standard_normal())
    if isinstance(x, (str, bytes)) or x is None:
        return x if x is None else type(x)()
    if isinstance(x, Mapping):
        return {key: _drawn_like(value, generator, integers, length) for key, value in x.items()}
    if isinstance(x, list) and x and all(isinstance(y, (int, float)) for y in x):
        return [_drawn_like(x[0], generator, integers, None) for _ in range(length or len(x))]
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(_drawn_like(y, generator, integers, length) for y in x))
    if isinstance(x, (list, tuple)):
        return type(x)(_drawn_like(y, generator, integers, length) for y in x)
    if hasattr(x, "__array_interface__") and hasattr(x, "mode"):  # an image
        values = generator.integers(0, 256, np.asarray(x).shape, dtype=np.uint8)
        return type(x).fromarray(values) if hasattr(type(x), "fromarray") else _image(values)
    raise TypeError(f"a record holds a value of type {type(x).__name__}, for which no public value can be drawn")


def _image(values: Any) -> Any:
    from PIL import Image

    return Image.fromarray(values)


def _tensor_like(x: Tensor, shape: list[int], generator: np.random.Generator, integers: str) -> Tensor:
    if x.is_floating_point() or x.is_complex():
        return torch.from_numpy(generator.standard_normal(shape)).to(x.dtype)
    if x.dtype == torch.bool:
        return torch.from_numpy(generator.integers(2, size=shape)).bool()
    most = 4 if integers == "tokens" and shape else 2
    values = np.ones(shape, dtype=np.int64) if integers == "ones" else generator.integers(most, size=shape)
    return torch.from_numpy(np.asarray(values)).to(x.dtype)


def _number(kind: str, generator: np.random.Generator, integers: str) -> float | int | bool:
    if kind == "f":
        return float(generator.standard_normal())
    if kind == "b":
        return bool(generator.integers(2))
    return 1 if integers == "ones" else int(generator.integers(2))
