"""Draw records with the types and shapes of another record, whose values are never read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

SEED = 20261125
_WORDS = ("a", "the", "good", "bad", "film", "was", "not", "very")
# Kinds of numpy's numbers to types of tensors; others are integers.
_NUMBERS = {"f": torch.float64, "b": torch.bool}
Axis = tuple[Any, ...]
"""Keys that lead to a value in a record, and a dimension of that value."""


def most_common(values: Iterable[Any]) -> Any:
    """Return the most frequent value, whatever the order of the values."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], repr(value)))


def kind_of(x: Any) -> Hashable:
    """Return types and ranks of a value and of what it holds, without values and lengths."""
    if isinstance(x, Tensor):
        return "tensor", x.dtype, x.dim()
    if isinstance(x, np.ndarray):
        # Texts and bytes have a type for each length.
        numbers = x.dtype if x.dtype.kind in "biufc" else x.dtype.kind
        return "array", numbers, x.ndim
    if isinstance(x, Mapping):
        keys = sorted(x, key=repr)
        return "mapping", tuple((key, kind_of(x[key])) for key in keys)
    if _is_uniform_list(x):
        return "list of", kind_of(_typical(x))
    if isinstance(x, (list, tuple)):
        return type(x), tuple(map(kind_of, x))
    if _is_image(x):
        return "image", x.mode
    return "value", type(x)


def _is_image(x: Any) -> bool:
    return hasattr(x, "__array_interface__") and hasattr(x, "mode")


_ELEMENTS = ((int, float), str, list, Mapping)


def _is_uniform_list(x: Any) -> bool:
    """Return whether the elements of a list are of one type, so that it may have any length."""
    if not isinstance(x, list) or not x:
        return False
    for kind in _ELEMENTS:
        if all(isinstance(element, kind) for element in x):
            return True
    return False


def _typical(x: list[Any]) -> Any:
    """Return the element of a uniform list that the others are like."""
    for element in x:
        if isinstance(element, float):
            # Whole numbers may be among the others.
            return element
    kind = most_common(map(kind_of, x))
    return next(element for element in x if kind_of(element) == kind)


def axes_of(x: Any, place: Axis = ()) -> Iterator[tuple[Axis, int]]:
    """Yield the axes of the tensors, lists, texts and images in a record, with their lengths."""
    for dim, length in enumerate(_shape(x)):
        yield (*place, dim), length
    for key, value in _items(x):
        yield from axes_of(value, (*place, key))


def _shape(x: Any) -> Sequence[int]:
    """Return the lengths of the axes of a value."""
    if isinstance(x, (Tensor, np.ndarray)):
        return x.shape
    if isinstance(x, str):
        return (len(x.split()),)
    if _is_image(x):
        return np.asarray(x).shape[:2]
    if _is_uniform_list(x):
        return (len(x),)
    return ()


def _items(x: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a mapping, a list or a tuple; of a uniform list, one value."""
    if isinstance(x, Mapping):
        return x.items()
    if _is_uniform_list(x):
        return [(0, _typical(x))]
    if isinstance(x, (list, tuple)):
        return enumerate(x)
    return ()


@dataclass(frozen=True)
class RecordDrawer:
    """Draws values of the types and shapes of other values.

    Attributes:
        generator: of all numbers.
        integers: as of `draw_public_rows`.
    """

    generator: np.random.Generator
    integers: str

    def value_like(
        self, x: Any, sizes: Mapping[Axis, int] = MappingProxyType({}), place: Axis = ()
    ) -> Any:
        """Return a random value of the type of x.

        Args:
            x: the value.
            sizes: axes of the record that get another length.
            place: where in the record x lies.
        """
        shape = [sizes.get((*place, dim), length) for dim, length in enumerate(_shape(x))]
        if isinstance(x, Tensor):
            return self._tensor(x.dtype, shape)
        if isinstance(x, np.ndarray):
            tensor = torch.from_numpy(np.ascontiguousarray(x))
            return self.value_like(tensor, sizes, place).numpy()
        if isinstance(x, (np.generic, int, float)):
            number = self._tensor(_number_type(x), []).item()
            return type(x)(number) if isinstance(x, np.generic) else number
        if x is None:
            return None
        if isinstance(x, str) and self.integers != "ones":
            words = self.generator.choice(_WORDS, shape)
            return type(x)(" ".join(words))
        if isinstance(x, (str, bytes)):
            return type(x)()
        if isinstance(x, (Mapping, list, tuple)):
            return self._container(x, shape, sizes, place)
        if _is_image(x):
            return self._image(x, shape)
        raise TypeError(
            f"a record holds a {type(x).__name__}, for which no public value can be drawn; pass"
            " public_records= (docs/errors.md#public-rows)"
        )

    def _container(
        self, x: Any, shape: Sequence[int], sizes: Mapping[Axis, int], place: Axis
    ) -> Any:
        """Return a mapping, list or tuple of random values."""
        if _is_uniform_list(x):
            like = _typical(x)
            if type(like) in (int, float):
                return self._tensor(_number_type(like), [*shape], are_single=True).tolist()
            (length,) = shape
            return [self.value_like(like, sizes, (*place, 0)) for _ in range(length)]
        values = {}
        for key, value in _items(x):
            # A collate function may cut a batch to the longest mask in it.
            drawer = replace(self, integers="bits") if self._is_mask(key) else self
            values[key] = drawer.value_like(value, sizes, (*place, key))
        if isinstance(x, Mapping):
            return values
        if hasattr(x, "_fields"):
            return type(x)(*values.values())
        return type(x)(values.values())

    def _is_mask(self, key: Any) -> bool:
        return self.integers == "tokens" and isinstance(key, str) and key.endswith("mask")

    def _image(self, x: Any, shape: Sequence[int]) -> Any:
        """Return an image of random bytes with the channels of another."""
        channels = np.asarray(x).shape[2:]
        pixels = self.generator.integers(0, 256, (*shape, *channels), dtype=np.uint8)
        from PIL import Image

        return Image.fromarray(pixels)

    def _tensor(self, dtype: torch.dtype, shape: list[int], *, are_single: bool = False) -> Tensor:
        """Return random numbers of a type.

        Args:
            dtype: of the numbers.
            shape: of the tensor; empty for one number.
            are_single: they become numbers of Python, each of which stands for itself.
        """
        if dtype.is_floating_point or dtype.is_complex:
            draw: Callable[[Any], Any] = self.generator.standard_normal
            stand_alone = are_single or not shape
            if self.integers == "ones" or (self.integers == "bits" and stand_alone):
                # Numbers of [0, 1], as probabilities are.
                draw = self.generator.random
            return torch.as_tensor(draw(shape)).to(dtype)
        if dtype == torch.bool:
            flags = self.generator.integers(0, 2, size=shape)
            return torch.as_tensor(flags).to(dtype)
        least = 1 if self.integers == "ones" else 0
        bound = 4 if self.integers == "tokens" and shape else 2
        values = self.generator.integers(least, bound, size=shape)
        if shape:
            # A mask of zeros alone attends to nothing, and then to padding as much as to a record.
            first = values[..., :1]
            np.maximum(first, 1, out=first)
        return torch.as_tensor(values).to(dtype)


def _number_type(x: Any) -> torch.dtype:
    """Return the type in which a number of Python or numpy is drawn."""
    kind = np.asarray(x).dtype.kind
    return _NUMBERS.get(kind, torch.int64)
