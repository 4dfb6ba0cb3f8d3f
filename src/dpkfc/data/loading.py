"""Loading: the indices of one logical batch become micro-batches of bounded size."""

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
    """Cut indices into nearly equal parts of bounded size, in order; no indices give no parts.

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
    bound = max_physical_batch_size or array.size
    return np.array_split(array, -(-array.size // bound))


def collate(source: Any, indices: NDArray[np.int64], collate_fn: Collate | None = None) -> Any:
    """Return one batch of the examples at these indices.

    Args:
        source: a map-style dataset, a TensorDataset or a tuple of tensors with a common first axis.
            The tensors of the last two are indexed at once unless a `collate_fn` is given.
        indices: `[n]`, n >= 1.
        collate_fn: list of examples to a batch; by default torch's own.

    Returns:
        The batch. A dict replaces any mapping of another kind (a tokenizer's `BatchEncoding`).
    """
    if collate_fn is None:
        tensors = tensors_of(source)
        if tensors is not None:
            index = torch.tensor(indices)
            return tuple(x[index.to(x.device)] for x in tensors)
    rows = Rows(source)
    return _PlainCollate(collate_fn or default_collate)([rows[i] for i in indices.tolist()])


@dataclass(frozen=True)
class _PlainCollate:
    """A collate function whose batches are made of containers that torch looks into.

    Any other container counts as one value: its tensors are not moved, and their shapes are not
    seen.
    """

    function: Collate

    def __call__(self, examples: list[Any]) -> Any:
        return _replace_mappings(self.function(examples))


class Fields(dict[str, Any]):
    """A dict whose items are attributes too, as those of the `BatchEncoding` that it replaces."""

    def __getattr__(self, name: str) -> Any:
        """Return the item of this name."""
        if name in self:
            return self[name]
        raise AttributeError(
            f"the batch is a dict without {name!r}; it has {', '.join(map(str, self))}"
        )

    def to(self, device: Any) -> Fields:
        """Return the batch with its tensors on a device; a session has moved them already."""
        moved: Fields = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, self)
        return moved


register_pytree_node(
    Fields,
    lambda fields: (list(fields.values()), list(fields)),
    lambda values, names: Fields(zip(names, values, strict=True)),
)


def _replace_mappings(batch: Any) -> Any:
    """Return the batch with `Fields` in place of mappings that pytree does not know."""

    def replace_mapping(x: Any) -> Any:
        if not isinstance(x, Mapping):
            return x
        return Fields((name, _replace_mappings(value)) for name, value in x.items())

    return tree_map(replace_mapping, batch)


class MicroBatches:
    """Cuts the indices of each step into micro-batches.

    Its worker processes live as long as the object.

    Args:
        dataset: a map-style dataset, a TensorDataset or a tuple of tensors with a common first
            axis.
        collate_fn: list of examples to a batch; by default torch's own.
        num_workers: processes that load examples; tensors are always indexed in this process.

    Raises:
        ValueError: a dataset without a length or indices, tensors of different lengths.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Tensor],
        collate_fn: Collate | None = None,
        num_workers: int = 0,
    ) -> None:
        if num_workers < 0:
            raise ValueError(f"num_workers must be >= 0, got {num_workers}")
        self._source: Any = dataset
        self._size = _length(dataset)
        self._collate_fn = collate_fn
        self._batch_indices: list[list[int]] = []
        self._loader: DataLoader[Any] | None = None
        if num_workers > 0 and (tensors_of(dataset) is None or collate_fn is not None):
            self._loader = DataLoader(
                Rows(dataset),
                batch_sampler=self._batch_indices,
                num_workers=num_workers,
                collate_fn=_PlainCollate(collate_fn or default_collate),
                persistent_workers=True,
            )

    def __len__(self) -> int:
        return self._size

    def example(self, index: int = 0) -> Any:
        """Return a record before it is collated, whose types and shapes public rows copy."""
        return Rows(self._source)[index]

    def collate(self, records: list[Any]) -> Any:
        """Return a batch of records as the loader makes it."""
        return _PlainCollate(self._collate_fn or default_collate)(records)

    def alone(self, index: int) -> Any:
        """Return a batch of one record."""
        return collate(self._source, np.array([index]), self._collate_fn)

    def load(self, parts: Sequence[NDArray[np.int64]]) -> Iterator[Any]:
        """Yield the micro-batches of one step that is already cut, in order.

        A caller may stop early: the next call starts with its own indices.

        Args:
            parts: indices `[n]` of the examples of each micro-batch, n >= 1.

        Raises:
            IndexError: an index outside the dataset.
        """
        for part in parts:
            for i in part.tolist():
                if not 0 <= i < self._size:
                    raise IndexError(f"index {i} is outside the dataset of {self._size} examples")
        return self._load(parts)

    def _load(self, parts: Sequence[NDArray[np.int64]]) -> Iterator[Any]:
        if self._loader is None:
            for part in parts:
                yield collate(self._source, part, self._collate_fn)
        elif parts:
            self._batch_indices[:] = [part.tolist() for part in parts]
            yield from self._loader

    def close(self) -> None:
        """End the worker processes; later batches are loaded in this process."""
        self._loader = None


class Rows(Dataset[Any]):
    """A dataset, or a tuple of tensors as one."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._tensors = tensors_of(source)

    def __getitem__(self, index: int) -> Any:
        if self._tensors is None:
            return self._source[index]
        return tuple(x[index] for x in self._tensors)


def tensors_of(source: Any) -> tuple[Tensor, ...] | None:
    """Return the tensors of a dataset with a common first axis, None for another dataset."""
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
            raise ValueError(
                f"the tensors of a dataset must have one length, got {sorted(lengths)}"
            )
        return lengths.pop()
    if isinstance(source, tuple) and any(isinstance(x, np.ndarray) for x in source):
        raise ValueError(
            "a tuple with NumPy arrays is no dataset; make tensors of them:"
            " tuple(torch.as_tensor(x) for x in arrays)"
        )
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise ValueError(
            f"{type(source).__name__} has no length or no indices; private sampling needs a"
            " map-style dataset"
        )
    return len(source)


# --------------------------------------------------------------------------------------------------
# The layout of a logical batch in micro-batches: the loaded rows and their weights.


@dataclass(frozen=True)
class Part:
    """One micro-batch: `units · group` rows of units, `group` rows each, and then padding.

    Attributes:
        records: rows to load `[n]`.
        weights: factor of each row's loss `[n]`, zero where a row fills a short unit or pads the
            micro-batch; None where all are 1.
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
    """Cut a sampled batch into micro-batches of bounded size; a unit is never split.

    Args:
        drawn: record numbers, `[n]` where a unit is a record, or `[n, k]` with -1 where a unit has
            fewer than k.
        bound: most rows of a micro-batch, None for one micro-batch. A single unit may exceed it.
        multiple: rows are padded to a multiple of it, so that few shapes occur.
        reduction: a unit's loss is the "mean" or the "sum" over its records.
        views: how often every record is loaded; its loss is the mean over the views.

    Returns:
        Parts that hold every unit once; none for an empty batch.
    """
    table = np.asarray(drawn, dtype=np.int64)
    if views > 1:
        if table.ndim == 1:
            table = table[:, None]
        table = np.repeat(table, views, axis=1)
    if table.ndim == 1:
        runs = split(table, bound)
        if multiple is not None:
            # Full micro-batches, and a smaller last one.
            step = bound or max(1, table.size)
            runs = [table[i : i + step] for i in range(0, table.size, step)]
        return [_part(run[:, None], multiple, reduction, 1) for run in runs]
    counts = (table >= 0).sum(1)
    # Units of similar size lie together, so that fewer rows fill short units.
    order = np.argsort(-counts, kind="stable")
    parts = []
    start = 0
    while start < len(order):
        width = int(counts[order[start]])
        end = len(order) if bound is None else start + max(1, bound // width)
        parts.append(_part(table[order[start:end], :width], multiple, reduction, views))
        start = end
    return parts


def _part(table: NDArray[np.int64], multiple: int | None, reduction: str, views: int) -> Part:
    """Return the part of units `[u, k]`.

    Short units are filled with their first record. Padding repeats the first record of the part.
    """
    is_record = table >= 0
    divisor = is_record.sum(1, keepdims=True) if reduction == "mean" else views
    records = np.where(is_record, table, table[:, :1]).ravel()
    weights = (is_record / divisor).ravel()
    padding = -records.size % multiple if multiple else 0
    records = np.concatenate([records, np.repeat(records[:1], padding)])
    weights = np.concatenate([weights, np.zeros(padding)])
    has_weights = not bool((weights == 1).all())
    units, group = table.shape
    return Part(records, weights if has_weights else None, units, group)
