"""Logical batches to micro-batches: the indices of one step become batches of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_map
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

Collate = Callable[[list[Any]], Any]


def split(indices: ArrayLike, max_physical_batch_size: int | None) -> list[NDArray[np.int64]]:
    """Cut indices into nearly equal parts of bounded size, in order; none at all for no indices.

    Args:
        indices: `[n]`.
        max_physical_batch_size: largest part; None for one part.

    Raises:
        ValueError: indices that are not a vector, or a bound below 1.
    """
    array = np.asarray(indices)
    if array.ndim != 1:
        raise ValueError(f"indices must be a vector, got an array of shape {array.shape}")
    if max_physical_batch_size is not None and max_physical_batch_size < 1:
        raise ValueError(f"max_physical_batch_size must be >= 1, got {max_physical_batch_size}")
    if array.size == 0:
        return []
    array = array.astype(np.int64, casting="same_kind")
    return np.array_split(array, -(-array.size // (max_physical_batch_size or array.size)))


def readings(source: Any, indices: NDArray[np.int64], collate_fn: Collate | None = None) -> Callable[..., Any]:
    """A function of places in `indices` to the batch of the examples there, which reads each once: augmentation may be random.

    Args:
        source: as of `collate`.
        indices: `[n]`.
        collate_fn: as of `collate`.
    """
    rows, held = Rows(source), dict[int, Any]()

    def batch_of(*places: int) -> Any:
        held.update({k: rows[int(indices[k])] for k in places if k not in held})
        return collate(held, np.array(places), collate_fn)

    return batch_of


def collate(source: Any, indices: NDArray[np.int64], collate_fn: Collate | None = None) -> Any:
    """One batch of the examples at these indices.

    Args:
        source: a map-style dataset, a TensorDataset or a tuple of tensors with a common first axis. The tensors of the
            last two are indexed at once unless a `collate_fn` is given.
        indices: `[n]`, n >= 1.
        collate_fn: list of examples to a batch; by default torch's own.

    Returns:
        The batch, with a dict in the place of any mapping of another kind (a tokenizer's `BatchEncoding`).
    """
    tensors = tensors_of(source)
    if tensors is not None:
        chosen = torch.tensor(indices)
        if collate_fn is None:
            return tuple(x[chosen.to(x.device)] for x in tensors)
        return _Plain(collate_fn)([tuple(x[i] for x in tensors) for i in indices.tolist()])
    return _Plain(collate_fn or default_collate)([source[i] for i in indices.tolist()])


@dataclass(frozen=True)
class _Plain:
    """A collate function whose batches are made of containers that torch looks into.

    What torch takes for one value is moved to no device, and no shape in it is seen.
    """

    function: Collate

    def __call__(self, examples: list[Any]) -> Any:
        return _plain(self.function(examples))


class Fields(dict[str, Any]):
    """A dict whose items are attributes too, as those of a tokenizer's `BatchEncoding`, in whose place it stands."""

    def __getattr__(self, name: str) -> Any:
        """The item of this name."""
        if name in self:
            return self[name]
        raise AttributeError(f"the batch is a dict without {name!r}; it has {', '.join(map(str, self))}")

    def to(self, device: Any) -> Fields:
        """The batch with its tensors on a device; a session has moved them already."""
        moved: Fields = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, self)
        return moved


register_pytree_node(Fields, lambda x: (list(x.values()), list(x)), lambda held, names: Fields(zip(names, held, strict=True)))


def _plain(batch: Any) -> Any:
    """The batch with mappings that pytree does not know as dicts, whatever they lie in."""
    return tree_map(lambda x: Fields((k, _plain(v)) for k, v in x.items()) if isinstance(x, Mapping) else x, batch)


class MicroBatches:
    """Cuts the indices of each step into micro-batches, with worker processes that live as long as this object.

    Args:
        dataset: a map-style dataset, a TensorDataset or a tuple of tensors with a common first axis.
        max_physical_batch_size: largest micro-batch; None for one micro-batch a step.
        collate_fn: list of examples to a batch; by default torch's own.
        num_workers: processes that load examples; tensors are indexed in this process anyway.

    Raises:
        ValueError: a dataset without a length or without indices, tensors of different lengths, a bound below 1.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Tensor],
        max_physical_batch_size: int | None = None,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
    ) -> None:
        split([], max_physical_batch_size)
        if num_workers < 0:
            raise ValueError(f"num_workers must be >= 0, got {num_workers}")
        self._source: Any = dataset
        self._size = _length(dataset)
        self._bound, self._collate_fn = max_physical_batch_size, collate_fn
        self._planned: list[list[int]] = []
        self._loader: DataLoader[Any] | None = None
        if num_workers > 0 and (tensors_of(dataset) is None or collate_fn is not None):
            self._loader = DataLoader(
                Rows(dataset),
                batch_sampler=self._planned,
                num_workers=num_workers,
                collate_fn=_Plain(collate_fn or default_collate),
                persistent_workers=True,
            )

    def __len__(self) -> int:
        return self._size

    def example(self, index: int = 0) -> Any:
        """Return a record before it is collated; types and shapes of one tell how public rows look."""
        return Rows(self._source)[index]

    def collate(self, records: list[Any]) -> Any:
        """Return a batch of records as the loader makes it."""
        return _Plain(self._collate_fn or default_collate)(records)

    def alone(self, index: int) -> Any:
        """Return a batch of one record."""
        return collate(self._source, np.array([index]), self._collate_fn)

    def __call__(self, indices: ArrayLike) -> Iterator[Any]:
        """The micro-batches of one step, in order; none for an empty batch.

        A caller may stop early: the next call starts with its own indices.

        Raises:
            ValueError: indices that are not a vector.
            IndexError: an index outside the dataset.
        """
        return self.load(split(indices, self._bound))

    def load(self, parts: Sequence[NDArray[np.int64]]) -> Iterator[Any]:
        """The micro-batches of one step, cut already.

        Args:
            parts: indices `[n]` of the examples of each, n >= 1.

        Raises:
            IndexError: an index outside the dataset.
        """
        outside = [i for part in parts for i in part.tolist() if not 0 <= i < self._size]
        if outside:
            raise IndexError(f"index {outside[0]} is outside the dataset of {self._size} examples")
        return self._load(parts)

    def _load(self, parts: Sequence[NDArray[np.int64]]) -> Iterator[Any]:
        if self._loader is None:
            for part in parts:
                yield collate(self._source, part, self._collate_fn)
        elif parts:
            self._planned[:] = [part.tolist() for part in parts]
            yield from self._loader

    def close(self) -> None:
        """Let the worker processes go; later batches are loaded in this process."""
        self._loader = None

    def __enter__(self) -> MicroBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Rows(Dataset[Any]):
    """A dataset, or a tuple of tensors seen as one."""

    def __init__(self, source: Any) -> None:
        self._source, self._tensors = source, tensors_of(source)

    def __getitem__(self, index: int) -> Any:
        return self._source[index] if self._tensors is None else tuple(x[index] for x in self._tensors)


def tensors_of(source: Any) -> tuple[Tensor, ...] | None:
    """The tensors that a dataset is, None where it is none of tensors with a common first axis."""
    if type(source) is TensorDataset:
        return tuple(source.tensors)
    if isinstance(source, (tuple, list)) and source and all(isinstance(x, Tensor) for x in source):
        return tuple(source)
    return None


def _length(source: Any) -> int:
    tensors = tensors_of(source)
    if tensors is not None:
        lengths = {x.shape[0] if x.ndim else 0 for x in tensors}
        if len(lengths) != 1:
            raise ValueError(f"the tensors of a dataset must have one length, got {sorted(lengths)}")
        return lengths.pop()
    if isinstance(source, tuple) and any(isinstance(x, np.ndarray) for x in source):
        raise ValueError(
            "a tuple with NumPy arrays is no dataset; make tensors of them: tuple(torch.as_tensor(x) for x in arrays)"
        )
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise ValueError(
            f"{type(source).__name__} has no length or no indices; private sampling needs a map-style dataset"
        )
    return len(source)


# --------------------------------------------------------------------------------------------------
# How the records of a logical batch are laid out in micro-batches: which rows are loaded and how
# much each counts.


@dataclass(frozen=True)
class Part:
    """One micro-batch. The first `units · group` rows are units, `group` rows each; what follows is padding.

    Attributes:
        records: rows to load `[n]`.
        weights: factor of each row's loss `[n]`, zero where a row fills a short unit or pads the micro-batch; None where
            all are 1.
        units: privacy units.
        group: rows a unit.
    """

    records: NDArray[np.int64]
    weights: NDArray[np.float64] | None
    units: int
    group: int = 1


def layout(
    drawn: ArrayLike,
    bound: int | None = None,
    multiple: int | None = None,
    reduction: str = "mean",
    views: int = 1,
) -> list[Part]:
    """Cut what was drawn into micro-batches of bounded size; a unit is never split.

    Args:
        drawn: record numbers, `[n]` where a unit is a record, or `[n, k]` with -1 where a unit has fewer than k.
        bound: most rows of a micro-batch, None for one micro-batch; a single unit with more rows exceeds it.
        multiple: rows are padded to a multiple of it, so that few shapes occur.
        reduction: a unit's loss is the "mean" or the "sum" over its records.
        views: how often every record is loaded; its loss is the mean over them.

    Returns:
        Parts that hold every unit once; none for an empty batch.
    """
    table = np.asarray(drawn, dtype=np.int64)
    if views > 1:
        table = np.repeat(table[:, None] if table.ndim == 1 else table, views, axis=1)
    if table.ndim == 1:
        cuts = split(table, bound) if multiple is None else _runs(table, bound)
        return [_part(cut[:, None], multiple, reduction, 1) for cut in cuts]
    counts = (table >= 0).sum(1)
    order = np.argsort(-counts, kind="stable")  # units of like size together: less filling
    parts, start = [], 0
    while start < len(order):
        width = int(counts[order[start]])
        rows = order[start:] if bound is None else order[start : start + max(1, bound // width)]
        parts.append(_part(table[rows, :width], multiple, reduction, views))
        start += len(rows)
    return parts


def _runs(records: NDArray[np.int64], bound: int | None) -> list[NDArray[np.int64]]:
    """Full micro-batches and a rest."""
    step = bound or max(1, records.size)
    return [records[i : i + step] for i in range(0, records.size, step)]


def _part(table: NDArray[np.int64], multiple: int | None, reduction: str, views: int) -> Part:
    """The part of units `[u, k]`; short units repeat a record of their own, padding repeats the first record."""
    real = table >= 0
    counts = real.sum(1, keepdims=True) if reduction == "mean" else views
    records, weights = np.where(real, table, table[:, :1]).ravel(), (real / counts).ravel()
    padding = -records.size % multiple if multiple else 0
    records = np.concatenate([records, np.repeat(records[:1], padding)])
    weights = np.concatenate([weights, np.zeros(padding)])
    return Part(records, None if bool((weights == 1).all()) else weights, *table.shape)
