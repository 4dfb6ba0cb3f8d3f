"""Public rows: records with the types and shapes of one record, and numbers of a fixed seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SEED = 20261125


@dataclass(frozen=True)
class PublicRows:
    """Public records, with a function that makes batches of them.

    Attributes:
        records: the records.
        collate: list of records to a batch.
        longer: records whose leading axes have different lengths; none where records have no such
            axis.
    """

    records: Sequence[Any]
    collate: Callable[[list[Any]], Any]
    longer: Sequence[Any] = ()

    def __len__(self) -> int:
        return len(self.records)

    def batch(self, indices: Sequence[int]) -> Any:
        """Return a batch of some records."""
        return self.collate([self.records[i] for i in indices])


def draw_public_rows(
    record: Any, count: int, collate: Callable[[list[Any]], Any], integers: str = "bits"
) -> PublicRows:
    """Draw records with the types and shapes of one record.

    Args:
        record: one record of a dataset. Its types and shapes are read, its values are not.
        count: records to draw.
        collate: list of records to a batch.
        integers: the integers to draw. "tokens" means 0 to 3 inside of sequences and 0 or 1
            elsewhere, "bits" means 0 or 1, which nearly all labels and tokens may be, and "ones"
            means 1.

    Returns:
        The records; floating-point numbers are standard normal.

    Raises:
        TypeError: a record with a value of a type that cannot be drawn, by name.
    """
    draw = _RecordDrawer(np.random.default_rng(_SEED), integers)
    records = [draw.value_like(record, None) for _ in range(count)]
    lengths = _lengths(record)
    longer: list[Any] = []
    if len(lengths) == 1:
        base = lengths.pop()
        sizes = (max(1, base // 2), base + 3, max(1, base // 3))
        longer = [draw.value_like(record, length) for length in sizes]
    return PublicRows(records, collate, longer)


def _is_list_of_numbers(x: Any) -> bool:
    return isinstance(x, list) and bool(x) and all(isinstance(y, (int, float)) for y in x)


def _lengths(record: Any) -> set[int]:
    """Return the lengths of the leading axes of the sequences in a record."""
    if isinstance(record, (Tensor, np.ndarray)):
        is_sequence = record.ndim in (1, 2) and record.shape[0] > 1
        return {int(record.shape[0])} if is_sequence else set()
    if _is_list_of_numbers(record):
        return {len(record)}
    parts: Any = ()
    if isinstance(record, Mapping):
        parts = record.values()
    elif isinstance(record, (list, tuple)):
        parts = record
    lengths: set[int] = set()
    for part in parts:
        lengths |= _lengths(part)
    return lengths


@dataclass(frozen=True)
class _RecordDrawer:
    """Draws values of the types and shapes of other values.

    Attributes:
        generator: of all numbers.
        integers: as of `draw_public_rows`.
    """

    generator: np.random.Generator
    integers: str

    def value_like(self, x: Any, length: int | None) -> Any:
        """Return a random value of the type of x.

        Args:
            x: the value.
            length: entries of every sequence; None for as many as in x.
        """
        if isinstance(x, Tensor):
            shape = list(x.shape)
            if length is not None and x.dim() in (1, 2) and shape[0] > 1:
                shape[0] = length
            return self._tensor(x.dtype, shape)
        if isinstance(x, np.ndarray):
            return self.value_like(torch.from_numpy(np.ascontiguousarray(x)), length).numpy()
        if isinstance(x, np.generic):
            return type(x)(self._number(x.dtype.kind))
        if isinstance(x, bool):
            return self._number("b")
        if isinstance(x, int):
            return self._number("i")
        if isinstance(x, float):
            return self._number("f")
        if x is None:
            return None
        if isinstance(x, (str, bytes)):
            return type(x)()
        if isinstance(x, Mapping):
            return {key: self.value_like(value, length) for key, value in x.items()}
        if _is_list_of_numbers(x):
            return [self.value_like(x[0], None) for _ in range(length or len(x))]
        if isinstance(x, (list, tuple)):
            values = [self.value_like(y, length) for y in x]
            is_named_tuple = isinstance(x, tuple) and hasattr(x, "_fields")
            return type(x)(*values) if is_named_tuple else type(x)(values)
        if hasattr(x, "__array_interface__") and hasattr(x, "mode"):
            return self._image(x)
        raise TypeError(
            f"a record holds a {type(x).__name__}, for which no public value can be drawn; pass"
            " public_records= (docs/errors.md#public-rows)"
        )

    def _image(self, x: Any) -> Any:
        pixels = self.generator.integers(0, 256, np.asarray(x).shape, dtype=np.uint8)
        if hasattr(type(x), "fromarray"):
            return type(x).fromarray(pixels)
        from PIL import Image

        return Image.fromarray(pixels)

    def _tensor(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.from_numpy(self.generator.standard_normal(shape)).to(dtype)
        if dtype == torch.bool:
            return torch.from_numpy(self.generator.integers(2, size=shape)).bool()
        if self.integers == "ones":
            return torch.ones(shape, dtype=dtype)
        bound = 4 if self.integers == "tokens" and shape else 2
        values = self.generator.integers(bound, size=shape)
        return torch.from_numpy(np.asarray(values)).to(dtype)

    def _number(self, kind: str) -> float | int | bool:
        """Return a number of a kind of numpy's types."""
        if kind == "f":
            return float(self.generator.standard_normal())
        if kind == "b":
            return bool(self.generator.integers(2))
        return 1 if self.integers == "ones" else int(self.generator.integers(2))
