"""Cut the indices of one logical batch into micro-batches of bounded size, and load them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_map, tree_map_only
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from dpkfc.data.stored_rows import StoredRows

Collate = Callable[[list[Any]], Any]
Indices = NDArray[np.int64]


def split(indices: ArrayLike, max_physical_batch_size: int | None) -> list[Indices]:
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
    return np.array_split(array, math.ceil(array.size / bound))


@dataclass(frozen=True)
class _PlainCollate:
    """A collate function whose batches are made of containers that torch looks into.

    Any other container counts as one value: its tensors are not moved, and their shapes are not
    seen. A batch that views a buffer of the function, or an array, is copied: the next batch may
    be written into it.
    """

    function: Collate

    def __call__(self, examples: list[Any]) -> Any:
        batch = self.function(examples)
        return tree_map_only(Tensor, _copy_view, _replace_mappings(batch))


def _copy_view(x: Tensor) -> Tensor:
    if x.layout is not torch.strided:
        return x
    is_view = x._base is not None or not x.untyped_storage().resizable()
    return x.clone() if is_view else x


def never_pads(collate: Collate) -> bool:
    """Return whether a collate function is torch's, which refuses tensors of several shapes.

    A program may have registered functions of its own with it, which pad.
    """
    function = collate.function if isinstance(collate, _PlainCollate) else collate
    places = {registered.__module__ for registered in default_collate_fn_map.values()}
    return function is default_collate and places == {default_collate.__module__}


class Fields(dict[str, Any]):
    """A dict whose items are attributes too, as in the `BatchEncoding` that it replaces."""

    def __getattr__(self, name: str) -> Any:
        """Return the item of this name."""
        if name in self:
            return self[name]
        raise AttributeError(
            f"the batch is a dict without {name!r}; it has {', '.join(map(str, self))}"
        )

    def to(self, device: Any) -> Fields:
        """Return the batch with its tensors on a device; a session has moved them already."""
        moved: Fields = tree_map_only(Tensor, lambda x: x.to(device), self)
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
        fields = Fields()
        for name, value in x.items():
            fields[name] = _replace_mappings(value)
        return fields

    return tree_map(replace_mapping, batch)


class MicroBatches:
    """Cuts the indices of each step into micro-batches.

    Its worker processes live as long as the object.

    Args:
        dataset: a map-style dataset, a TensorDataset or a tuple of tensors with a common first
            axis. The tensors of the last two are indexed at once unless a `collate_fn` is given.
        collate_fn: list of examples to a batch; by default torch's own.
        num_workers: processes that load examples; tensors are always indexed in this process.

    Attributes:
        collate: makes a batch of records. A dict replaces any mapping of another kind (a
            tokenizer's `BatchEncoding`).

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
        self._size = _length(dataset)
        self._rows = RowDataset(dataset)
        self._tensors = tensors_of(dataset) if collate_fn is None else None
        self.collate = _PlainCollate(collate_fn or default_collate)
        self._batch_indices: list[list[int]] = []
        self._loader: DataLoader[Any] | None = None
        if num_workers > 0 and self._tensors is None:
            self._loader = DataLoader(
                self._rows,
                batch_sampler=self._batch_indices,
                num_workers=num_workers,
                collate_fn=self.collate,
                persistent_workers=True,
            )

    def __len__(self) -> int:
        return self._size

    def example(self, index: int = 0) -> Any:
        """Return a record before it is collated, whose types and shapes public rows copy."""
        return self._rows[index]

    def load_one(self, index: int) -> Any:
        """Return a batch of one record."""
        return self.batch(np.array([index]))

    def batch(self, indices: Indices) -> Any:
        """Return one batch of the examples at these indices `[n]`, n >= 1."""
        if self._tensors is None:
            return self.collate([self._rows[i] for i in indices.tolist()])
        index = torch.tensor(indices)
        # A list, as of torch's own function, which makes the batches of public rows.
        return [x[index.to(x.device)] for x in self._tensors]

    def load(self, parts: Sequence[Indices]) -> Iterator[Any]:
        """Yield the micro-batches of one step that is already cut, in order.

        A caller may stop early: the next call starts with its own indices. Where the dataset or the
        collate function raises an exception, the exception stands in place of the micro-batch.

        Args:
            parts: indices `[n]` of the examples of each micro-batch, n >= 1.

        Raises:
            IndexError: an index outside the dataset.
        """
        for part in parts:
            outside = part[(part < 0) | (part >= self._size)]
            if outside.size:
                raise IndexError(
                    f"index {outside[0]} is outside the dataset of {self._size} examples"
                )
        return self._load(parts)

    def _load(self, parts: Sequence[Indices]) -> Iterator[Any]:
        batches: Iterator[Any] = map(self.batch, parts)
        if self._loader is not None and parts:
            self._batch_indices[:] = [part.tolist() for part in parts]
            batches = iter(self._loader)
        for _ in parts:
            try:
                batch = next(batches)
            except Exception as error:
                batch = error
            yield batch

    def close(self) -> None:
        """End the worker processes; later batches are loaded in this process."""
        self._loader = None


class RowDataset(Dataset[Any]):
    """A dataset, or a tuple of tensors as one."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._tensors = tensors_of(source)

    def __getitem__(self, index: int) -> Any:
        if self._tensors is None:
            return self._source[index]
        return tuple(x[index] for x in self._tensors)


def tensors_of(source: Any, kinds: Any = Tensor | StoredRows) -> tuple[Any, ...] | None:
    """Return the tensors of a dataset with a common first axis, None for another dataset.

    Args:
        source: the dataset.
        kinds: classes of tensors.
    """
    if type(source) is TensorDataset:
        return tuple(source.tensors)
    if isinstance(source, (tuple, list)) and source:
        if all(isinstance(x, kinds) for x in source):
            return tuple(source)
    return None


def _check_indexed_by_record(dataset: Any) -> None:
    """Refuse an object that holds data, but not record i under the index i.

    Raises:
        ValueError: a loader, a data frame or a mapping of columns; naming what to pass.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise ValueError(
            "a Session samples its batches itself; pass loader.dataset instead of the DataLoader"
            ", collate_fn= and num_workers= (docs/errors.md#sampler)"
        )
    if hasattr(dataset, "iloc"):
        raise ValueError(
            f"a {kind} is indexed by its columns, not by its records; pass a tuple of tensors, each"
            " torch.as_tensor(frame[columns].to_numpy())"
        )
    if isinstance(dataset, Mapping) and not all(isinstance(key, int) for key in dataset):
        raise ValueError(
            f"a {kind} of columns is indexed by their names, not by records; pass a tuple of"
            " tensors, tuple(columns.values()), or a list with a dict for each record"
        )


def _length(source: Any) -> int:
    _check_indexed_by_record(source)
    tensors = tensors_of(source)
    if tensors is not None:
        lengths = {x.shape[0] if x.ndim else 0 for x in tensors}
        kind = type(source).__name__
        if len(lengths) != 1 or not all(x.ndim for x in tensors):
            raise ValueError(
                f"the tensors of a {kind} are columns and must have one length, got"
                f" {sorted(lengths)[:3]}; records are a list of (x,) or one tensor"
            )
        if isinstance(source, list) and len(source) in lengths:
            raise ValueError(
                f"a list of {len(source)} tensors with {len(source)} rows may hold columns or"
                " records; pass a tuple for columns, torch.stack(dataset) for records"
            )
        return lengths.pop()
    if isinstance(source, tuple) and any(isinstance(x, np.ndarray) for x in source):
        raise ValueError(
            "a tuple with NumPy arrays is not a dataset; make tensors of them:"
            " tuple(torch.as_tensor(x) for x in arrays)"
        )
    if not is_map_style(source):
        raise ValueError(
            f"{type(source).__name__} has no length or no indices; private sampling needs a"
            " map-style dataset"
        )
    return len(source)


def fix_of_size(source: Any) -> str:
    """Return what to do about a dataset of another size than the plan's, with how it is read."""
    fix = "calibrate with dataset_size=len(dataset)"
    kind = type(source).__name__
    if not isinstance(source, (list, tuple)):
        return fix
    if tensors_of(source) is not None:
        return f"tensors of a {kind} are columns: for records pass torch.stack(dataset)"
    return f"{fix} (columns are a tuple of tensors)"


class _Items(Dataset[Any]):
    """A list or tuple as torch's loader reads it: each of its items is a record."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


def records_of(loader: DataLoader[Any]) -> Any:
    """Return the dataset of a torch loader, where each item of a list or tuple is a record."""
    dataset: Any = loader.dataset
    return _Items(dataset) if isinstance(dataset, (list, tuple)) else dataset


def is_map_style(source: Any) -> bool:
    """Return whether an object has a length and indices."""
    # A stream inherits the method for indices, which raises.
    is_stream = isinstance(source, IterableDataset)
    return hasattr(source, "__len__") and hasattr(source, "__getitem__") and not is_stream


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

    records: Indices
    weights: NDArray[np.float64] | None
    units: int
    group: int = 1


def layout(
    drawn: ArrayLike,
    bound: int | None = None,
    reduction: str = "mean",
    views: int = 1,
    least: int | None = None,
) -> list[Part]:
    """Cut a sampled batch into micro-batches of bounded size; a unit is never split.

    Args:
        drawn: record numbers, `[n]` where a unit is a record, or `[n, k]` with -1 where a unit has
            fewer than k.
        bound: most rows of a micro-batch, None for one micro-batch. A single unit may exceed it.
        reduction: a unit's loss is the "mean" or the "sum" over its records.
        views: how often every record is loaded; its loss is the mean over the views.
        least: rows of a micro-batch, to which it is padded. None pads a row that is alone, except
            where the bound is 1: a row alone takes another path than rows together. So it is alone
            in every batch, or in none.

    Returns:
        Parts that hold every unit once; none for an empty batch.
    """
    table = np.asarray(drawn, dtype=np.int64)
    least = least or (1 if bound == 1 else 2)
    if table.ndim == 1 and views == 1:
        runs = split(table, bound)
        return [_part(run[:, None], least, reduction, views) for run in runs]
    # Otherwise full micro-batches, and a smaller last one.
    if table.ndim == 1:
        table = table[:, None]
    table = np.repeat(table, views, axis=1)
    counts = (table >= 0).sum(1)
    # Units of similar size lie together, so that fewer rows fill short units.
    order = np.argsort(-counts, kind="stable")
    parts = []
    start = 0
    while start < len(order):
        width = int(counts[order[start]])
        end = len(order)
        if bound is not None:
            end = start + max(1, bound // width)
        units = table[order[start:end], :width]
        parts.append(_part(units, least, reduction, views))
        start = end
    return parts


def _part(table: Indices, least: int, reduction: str, views: int) -> Part:
    """Return the part of units `[u, k]`, of at least `least` rows.

    Short units are filled with their first record. Padding repeats the first record of the part.
    """
    units, group = table.shape
    is_record = table >= 0
    divisor: Any = views
    if reduction == "mean":
        divisor = is_record.sum(1, keepdims=True)
    records = np.where(is_record, table, table[:, :1]).ravel()
    weights = (is_record / divisor).ravel()
    padding = max(0, least - records.size)
    fillers = np.repeat(records[:1], padding)
    records = np.concatenate([records, fillers])
    weights = np.concatenate([weights, np.zeros(padding)])
    if (weights == 1).all():
        return Part(records, None, units, group)
    return Part(records, weights, units, group)
