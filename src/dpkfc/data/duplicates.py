"""Find records that occur more than once: in a dataset, or in two datasets."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from dpkfc.data.loading import Indices, is_map_style, tensors_of
from dpkfc.data.stored_rows import StoredRows

# --------------------------------------------------------------------------------------------------
# Repeated and shared records: refused, or compared where a user asks for it.
#
# Curvature of a private example is not public curvature. No training compares rows by itself:
# whether it ran would tell whether a public record is in the private data. Rows are compared by a
# hash of the bytes of every tensor or number in their input. Equal rows are therefore found, and
# near-duplicates (another crop, another precision) are not.


_NAMED_ROWS = 5  # in a message
_LABELS = ("labels", "label", "y", "target", "targets")


def shared_rows(public: Any, private: Any) -> list[tuple[int, int]]:
    """Return pairs (public row, private row) with the same input.

    The result is PRIVATE: it tells who is in the private dataset.

    Args:
        public: inputs `[n, ...]`, a mapping of such tensors, or a dataset as `private`.
        private: tensors with a common leading axis of which the first is the input, a mapping of
            tensors, a tensor, or a map-style dataset. The examples of a dataset are inputs, pairs
            that begin with one, or mappings. Labels (`labels`, `label`, `y`) do not count.
    """
    public_rows: dict[bytes, int] = {}
    for i, row in enumerate(_inputs(public)):
        public_rows.setdefault(hash_row(row), i)
    pairs = []
    for i, row in enumerate(_inputs(private)):
        key = hash_row(row)
        if key in public_rows:
            pairs.append((public_rows[key], i))
    return pairs


def check_disjoint(public: Any, private: Any, name: str = "the public data") -> None:
    """Refuse a public dataset that shares rows with a private one; arguments as in `shared_rows`.

    The outcome is PRIVATE, like `shared_rows`. Call it for yourself, before any plan is made.

    Args:
        public: the data of curvature or pretraining.
        private: the data to protect.
        name: of the public data, for the message.

    Raises:
        ValueError: naming the first shared rows of the public data.
    """
    rows = sorted({public_row for public_row, _ in shared_rows(public, private)})
    if not rows:
        return
    named = ", ".join(map(str, rows[:_NAMED_ROWS]))
    if len(rows) > _NAMED_ROWS:
        named += ", …"
    raise ValueError(
        f"{name} and the private dataset share {len(rows)} rows (public rows {named}): ε does not"
        " cover curvature or weights of them; remove them from one"
    )


def _inputs(data: Any) -> Iterator[Any]:
    """Yield the input of every example."""
    tensors = tensors_of(data, Tensor | StoredRows | np.ndarray)
    if tensors is not None:
        # The columns of a dataset, of which the first is the input.
        data = tensors[0]
    if isinstance(data, Tensor | StoredRows | np.ndarray):
        yield from data
    elif isinstance(data, Mapping):
        columns = _input_of(data)
        size = len(next(iter(columns.values())))
        for i in range(size):
            yield {name: column[i] for name, column in columns.items()}
    else:
        for i in range(len(data)):
            yield _input_of(data[i])


def _input_of(example: Any) -> Any:
    """Return an example without its label."""
    if isinstance(example, Mapping):
        return {name: value for name, value in example.items() if name not in _LABELS}
    if isinstance(example, tuple | list) and len(example):
        return example[0]
    return example


def hash_row(row: Any) -> bytes:
    """Return a hash of the numbers and texts in a record, whatever its containers."""
    digest = hashlib.sha256()
    for part in _row_bytes(row):
        digest.update(part)
    return digest.digest()


def _row_bytes(row: Any) -> Iterator[bytes]:
    """Yield bytes that are equal for equal values: floats as float32, integers as int64."""
    if isinstance(row, Mapping):
        for name in sorted(row):
            yield name.encode()
            yield from _row_bytes(row[name])
    elif isinstance(row, bytes):
        yield row
    elif isinstance(row, str):
        yield row.encode()
    elif isinstance(row, Sequence) and any(isinstance(x, str | Mapping | Tensor) for x in row):
        for part in row:
            yield from _row_bytes(part)
    else:
        yield from _number_bytes(row)


def _number_bytes(numbers: Any) -> Iterator[bytes]:
    if not isinstance(numbers, Tensor):
        numbers = torch.as_tensor(np.asarray(numbers))
    x = numbers.detach().cpu()
    if x.is_floating_point():
        # Adding zero makes minus zero zero.
        x = x.float() + 0.0
    else:
        x = x.long()
    shape = str(tuple(x.shape))
    yield shape.encode()
    yield x.numpy().tobytes()


# --------------------------------------------------------------------------------------------------
# Records that stand in a dataset more than once. Where single examples are protected, each would
# count as several.

_ATOMS = (str, bytes, int, float, complex, type(None))  # equal ones may be one object


def check_once(
    *datasets: Any, fix: str = "leave repeats out, or pass units= and max_records_per_unit"
) -> None:
    """Refuse datasets in which a record stands twice.

    An example that stands in a dataset k times is drawn k times, and moves a sum by k C. The check
    does not read the examples. It sees torch's views (`Subset`, `ConcatDataset`), objects around a
    dataset of their length or with `dataset` and `indices`, lists whose items are the same objects,
    and selections and concatenations of Hugging Face's datasets.

    Args:
        datasets: any.
        fix: for the message.

    Raises:
        ValueError: with the fix.
    """
    if len(datasets) == 1 and _is_whole(datasets[0]):
        return
    if any(rows.size > np.unique(rows).size for rows in _rows_by_storage(*datasets).values()):
        raise ValueError(
            "some records occur more than once in the dataset, and each would count several times:"
            f" {fix}"
        )


def check_held_out(held_out: Any, private: Any, name: str) -> None:
    """Refuse data for evaluation that is, or holds, records of the private dataset.

    Common records are found as in `check_once`; no record is read.

    Args:
        held_out: map-style dataset.
        private: the dataset of the training.
        name: of the held-out data, for the message.

    Raises:
        ValueError: naming the fix.
    """
    if not (is_map_style(held_out) and is_map_style(private)):
        return
    if held_out is private or _has_common_rows(held_out, private):
        raise ValueError(
            f"{name} holds records of the train_dataset, and ε does not cover metrics without noise"
            " of them. Evaluate on other data"
        )


def _is_whole(dataset: Any) -> bool:
    """Return whether a dataset is a storage with each of its rows once, found without its rows."""
    if isinstance(dataset, ConcatDataset) or hasattr(dataset, "_indices"):
        return False
    inner, indices = _find_inner(dataset)
    if inner is not None:
        return indices is None and _is_whole(inner)
    return type(dataset) not in (list, tuple) or tensors_of(dataset) is not None


def _rows_by_storage(*datasets: Any) -> dict[Any, Indices]:
    """Return the storages of datasets' rows, each with the numbers of the rows in it."""
    parts: dict[Any, list[Indices]] = defaultdict(list)
    for dataset in datasets:
        if hasattr(dataset, "__len__"):
            tensors = tensors_of(dataset)
            size = len(tensors[0]) if tensors else len(dataset)
            for storage, rows in _locate(dataset, np.arange(size, dtype=np.int64)):
                parts[storage].append(rows)
    return {storage: np.concatenate(rows) for storage, rows in parts.items()}


def _has_common_rows(dataset: Any, other: Any) -> bool:
    rows = _rows_by_storage(dataset)
    other_rows = _rows_by_storage(other)
    for storage in rows.keys() & other_rows.keys():
        if np.isin(rows[storage], other_rows[storage]).any():
            return True
    return False


def _locate(dataset: Any, rows: Indices) -> Iterator[tuple[Any, Indices]]:
    """Yield where rows of a dataset are stored: an identifier of the storage, and row numbers."""
    if isinstance(dataset, ConcatDataset):
        start = 0
        for part, end in zip(dataset.datasets, dataset.cumulative_sizes, strict=True):
            own = rows[(rows >= start) & (rows < end)]
            yield from _locate(part, own - start)
            start = end
        return
    inner, indices = _find_inner(dataset)
    if inner is not None:
        if indices is not None:
            inner_rows = np.where(indices < 0, indices + len(inner), indices)
            rows = inner_rows[rows]
        yield from _locate(inner, rows)
    elif type(dataset) in (list, tuple) and tensors_of(dataset) is None:
        objects = [id(dataset[i]) for i in rows.tolist() if not isinstance(dataset[i], _ATOMS)]
        yield "objects", np.array(objects, dtype=np.int64)
    elif hasattr(dataset, "_indices") and hasattr(dataset, "_data"):
        yield from _locate_in_table(dataset, rows)
    else:
        tensors = tensors_of(dataset)
        yield id(tensors[0] if tensors else dataset), rows


def _find_inner(dataset: Any) -> tuple[Any, Indices | None]:
    """Return the dataset that a view shows, and its indices; None for all rows in order."""
    attributes = getattr(dataset, "__dict__", {})
    inner = attributes.get("dataset")
    indices = attributes.get("indices")
    if hasattr(inner, "__len__") and indices is not None:
        if isinstance(dataset, Subset) or len(indices) == len(dataset):
            return inner, np.asarray(indices, dtype=np.int64).reshape(-1)
    for value in (inner, *attributes.values()):
        is_view = isinstance(value, Subset | ConcatDataset) or hasattr(value, "_indices")
        if value is not inner and not is_view:
            continue
        if hasattr(value, "__len__") and len(value) == len(dataset):
            return value, None
    return None, None


def _locate_in_table(dataset: Any, rows: Indices) -> Iterator[tuple[Any, Indices]]:
    """Locate rows of a Hugging Face dataset by the memory of its table.

    A selection shares this memory, and so do concatenated parts.
    """
    if dataset._indices is not None:
        selected = dataset._indices.column(0).to_numpy()
        rows = np.asarray(selected, dtype=np.int64)[rows]
    table = dataset._data
    columns = [map(_describe_chunk, table.column(k).chunks) for k in range(table.num_columns)]
    start = 0
    for parts in zip(*columns, strict=False):
        storage, places = zip(*parts, strict=True)
        if len(set(places)) != 1:
            # Columns that are cut in different ways are not compared.
            break
        offset, size = places[0]
        end = start + size
        own = rows[(rows >= start) & (rows < end)]
        yield storage, own - start + offset
        start = end
    yield id(dataset), rows[rows >= start]


def _describe_chunk(chunk: Any) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the addresses of a chunk's buffers, and its offset in them with its length."""
    addresses = tuple(x.address for x in chunk.buffers() if x is not None)
    return addresses, (chunk.offset, len(chunk))
