"""Do a public and a private dataset share rows? Curvature of a private example is no public curvature.

Rows are compared by a hash of the bytes of every tensor or number in their input, so equal rows are found, and near-duplicates
(another crop, another precision) are not.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from dpkfc.data.loading import tensors_of

_NAMED = 5  # rows that a message names


def shared_rows(public: Any, private: Any) -> list[tuple[int, int]]:
    """Pairs (public row, private row) with the same input.

    Args:
        public: inputs `[n, ...]`, a mapping of such tensors, or a dataset as `private`.
        private: tensors with a common leading axis whose first is the input, a mapping of tensors, a tensor, or a map-style
            dataset whose examples are inputs, pairs that begin with one, or mappings. Labels (`labels`, `label`, `y`) do not
            count.

    The result is PRIVATE: it tells who is in the private dataset.
    """
    known: dict[bytes, int] = {}
    for index, row in enumerate(_rows(public)):
        known.setdefault(digest(row), index)
    return [(known[key], i) for i, key in enumerate(map(digest, _rows(private))) if key in known]


def check_disjoint(public: Any, private: Any, name: str = "the public data") -> None:
    """Raise where a public and a private dataset share rows; arguments as in `shared_rows`.

    Args:
        public: what curvature or pretraining reads.
        private: what is protected.
        name: of the public data, for the message.

    Raises:
        ValueError: naming the first shared rows of the public data.
    """
    found = shared_rows(public, private)
    if not found:
        return
    rows = sorted({index for index, _ in found})
    named = ", ".join(map(str, rows[:_NAMED])) + (", …" if len(rows) > _NAMED else "")
    raise ValueError(
        f"{name} and the private dataset share {len(rows)} rows (public rows {named}): a private example is not public, and "
        "curvature or weights made from it are not covered by ε; leave these rows out of one of the two"
    )


def check_probes(preconditioner: Any, private: Any) -> None:
    """Raise where a probe with public examples shares rows with a private dataset that lies in memory.

    A dataset that loads its examples is not read through for this; call `check_disjoint` where it should be.

    Args:
        preconditioner: the settings, None for none; the stored inputs of its probes are checked.
        private: the dataset.

    Raises:
        ValueError: as `check_disjoint`.
    """
    if preconditioner is None or not in_memory(private):
        return
    for role, probe in preconditioner.probes.items():
        if probe.stored_inputs is not None:
            check_disjoint(probe.stored_inputs, private, f"the {role.replace('_', ' ')} of {type(preconditioner).__name__}")


def in_memory(data: Any) -> bool:
    """Whether a dataset is tensors with a common leading axis, a list of examples, or a subset of one of these."""
    while isinstance(data, Subset):
        data = data.dataset
    if _columns(data) is not None:
        return True
    return isinstance(data, list) and len(data) > 0 and isinstance(_input(data[0]), _COMPARED)


def _columns(data: Any) -> Sequence[Any] | None:
    """The tensors of a dataset that is nothing else."""
    tensors = tensors_of(data)
    if tensors is None and isinstance(data, tuple | list) and all(isinstance(x, Tensor | np.ndarray) for x in data):
        return data or None
    return tensors


_LABELS = ("labels", "label", "y", "target", "targets")
_COMPARED = (Tensor, np.ndarray, str, bytes, Mapping)


def _rows(data: Any) -> Iterator[Any]:
    """The input of every example."""
    if isinstance(data, Tensor | np.ndarray):
        yield from data
    elif isinstance(data, Mapping):
        held = {name: column for name, column in data.items() if name not in _LABELS}
        size = len(next(iter(held.values())))
        yield from ({name: column[i] for name, column in held.items()} for i in range(size))
    elif (columns := _columns(data)) is not None:
        yield from columns[0]
    else:
        yield from (_input(data[i]) for i in range(len(data)))


def _input(example: Any) -> Any:
    """What an example holds beside its label."""
    if isinstance(example, Mapping):
        return {name: x for name, x in example.items() if name not in _LABELS}
    return example[0] if isinstance(example, tuple | list) and len(example) else example


def digest(row: Any) -> bytes:
    """A hash of the numbers and texts in a record, equal for equal values whatever holds them."""
    digest = hashlib.sha256()
    for piece in _pieces(row):
        digest.update(piece)
    return digest.digest()


def _pieces(row: Any) -> Iterator[bytes]:
    """Bytes that are the same for equal values, whatever holds them: floats as float32, integers as int64."""
    if isinstance(row, Mapping):
        for name in sorted(row):
            yield from (name.encode(), *_pieces(row[name]))
    elif isinstance(row, str | bytes):
        yield row.encode() if isinstance(row, str) else row
    elif isinstance(row, Sequence) and any(isinstance(x, str | Mapping | Tensor) for x in row):
        for x in row:
            yield from _pieces(x)
    else:
        x = torch.as_tensor(np.asarray(row) if not isinstance(row, Tensor) else row.detach().cpu())
        x = x.float() + 0.0 if x.is_floating_point() else x.long()  # minus zero is zero
        yield str(tuple(x.shape)).encode()
        yield x.contiguous().numpy().tobytes()


# --------------------------------------------------------------------------------------------------
# Records that stand in a data set more than once: where single examples are protected, each would
# count as several.

_Places = NDArray[np.int64]
_ATOMS = (str, bytes, int, float, complex, type(None))  # equal ones may be one object
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPREAD = 8  # records that are compared
_AT_ONCE = 1 << 20  # numbers that are hashed together
_RECORDS_COMPARED = 1000  # pairs of rows with one hash


def check_once(dataset: Any) -> None:
    """Raise where a data set shows, without reading it, that a record stands in it twice; warn where rows of tensors are equal.

    Looked at are torch's views (`Subset`, `ConcatDataset`), objects around a data set of their length or with `dataset` and
    `indices`, lists whose items are the same objects, and selections and concatenations of Hugging Face's data sets. An example
    that stands there k times is drawn k times and moves a sum by k C.

    Args:
        dataset: any.

    Raises:
        ValueError: naming how many there are, and what to do.
    """
    found: dict[Any, list[_Places]] = {}
    if hasattr(dataset, "__len__"):
        for where, rows in _places(dataset, np.arange(len(dataset), dtype=np.int64)):
            found.setdefault(where, []).append(rows)
    repeated = sum(rows.size - np.unique(rows).size for rows in map(np.concatenate, found.values()))
    if repeated:
        raise ValueError(
            f"{repeated} records stand in the dataset more than once (indices that repeat, parts that overlap, one object "
            "several times in a list): an example would count several times, and ε is that of one. Leave the repeats out, weight "
            "the losses instead, or protect the original record: PrivacyConfig(unit='record', max_records_per_unit=...) with "
            "units=, the number of the original record for each one here"
        )
    tensors = tensors_of(dataset)
    if tensors is not None and _equal_rows(tensors):
        warnings.warn(
            "some records of the dataset are equal, byte for byte. Those of different people may be; but where one was copied, "
            "each copy counts, and ε is that of one: leave copies out, or protect the original record with units=",
            UserWarning,
            stacklevel=2,
        )


def check_held_out(held_out: Any, private: Any, name: str) -> None:
    """Raise where data to evaluate on is, or holds, records of the private data set.

    Seen are common records as `check_once` sees them; and a few records, spread over the held-out ones, that are all equal to
    those in the same places of the private data set, from its beginning or its end (a slice that was copied).

    Args:
        held_out: map-style data set.
        private: the data set that is trained on.
        name: of the first, for the message.

    Raises:
        ValueError: naming the fix.
    """
    if not all(hasattr(x, "__len__") and hasattr(x, "__getitem__") for x in (held_out, private)):
        return
    if held_out is private or _common(held_out, private) or _is_slice(held_out, private):
        raise ValueError(
            f"{name} holds records of the train_dataset: their metrics would be logged without noise, choose checkpoints and end "
            "a run, and ε would not cover that. Evaluate on other data"
        )


def _common(one: Any, other: Any) -> bool:
    places: list[dict[Any, list[_Places]]] = [{}, {}]
    for found, dataset in zip(places, (one, other), strict=True):
        for where, rows in _places(dataset, np.arange(len(dataset), dtype=np.int64)):
            found.setdefault(where, []).append(rows)
    ours, theirs = places
    shared = ours.keys() & theirs.keys()
    return any(np.isin(np.concatenate(ours[where]), np.concatenate(theirs[where])).any() for where in shared)


def _is_slice(one: Any, other: Any) -> bool:
    if not 0 < len(one) <= len(other):
        return False
    rows = np.unique(np.linspace(0, len(one) - 1, _SPREAD).astype(int)).tolist()
    with suppress(TypeError, ValueError, RuntimeError):  # records without numbers and texts are not compared
        ours = [digest(one[i]) for i in rows]
        return any(ours == [digest(other[i + start]) for i in rows] for start in (0, len(other) - len(one)))
    return False


def _places(dataset: Any, rows: _Places) -> Iterator[tuple[Any, _Places]]:
    """Where these rows of a data set lie: what holds them, and their numbers in it."""
    inner, indices = _around(dataset)
    if isinstance(dataset, ConcatDataset):
        starts = np.concatenate([[0], dataset.cumulative_sizes])
        for part, start, end in zip(dataset.datasets, starts, starts[1:], strict=False):
            yield from _places(part, rows[(rows >= start) & (rows < end)] - start)
    elif inner is not None:
        yield from _places(inner, rows if indices is None else np.where(indices < 0, indices + len(inner), indices)[rows])
    elif type(dataset) in (list, tuple) and tensors_of(dataset) is None:
        chosen = [dataset[i] for i in rows.tolist()]
        yield "objects", np.array([id(x) for x in chosen if not isinstance(x, _ATOMS)], dtype=np.int64)
    elif hasattr(dataset, "_indices") and hasattr(dataset, "_data"):
        yield from _of_hugging_face(dataset, rows)
    else:
        yield id(dataset), rows


def _around(dataset: Any) -> tuple[Any, _Places | None]:
    """The data set that another one is a view of, and its indices in it; None where it is all of it, in order."""
    held = getattr(dataset, "__dict__", {})
    inner, indices = held.get("dataset"), held.get("indices")
    if hasattr(inner, "__len__") and indices is not None and (isinstance(dataset, Subset) or len(indices) == len(dataset)):
        return inner, np.asarray(indices, dtype=np.int64).reshape(-1)
    views = [x for x in held.values() if isinstance(x, (Subset, ConcatDataset)) or hasattr(x, "_indices")]
    views = [x for x in [inner, *views] if hasattr(x, "__len__") and len(x) == len(dataset)]
    return (views[0], None) if views and not isinstance(dataset, ConcatDataset) else (None, None)


def _of_hugging_face(dataset: Any, rows: _Places) -> Iterator[tuple[Any, _Places]]:
    """By the memory in which the rows of its table lie: a selection shares it, and so do parts that were put together."""
    if dataset._indices is not None:
        rows = np.asarray(dataset._indices.column(0).to_numpy(), dtype=np.int64)[rows]
    columns = [[_memory(chunk) for chunk in dataset._data.column(k).chunks] for k in range(dataset._data.num_columns)]
    start = 0
    for parts in zip(*columns, strict=False):
        if len({(offset, size) for _, offset, size in parts}) != 1:
            break  # columns that are cut in different ways are not compared
        (offset, size), where = parts[0][1:], tuple(address for address, *_ in parts)
        yield where, rows[(rows >= start) & (rows < start + size)] - start + offset
        start += size
    yield id(dataset), rows[rows >= start]


def _memory(chunk: Any) -> tuple[tuple[int, ...], int, int]:
    return tuple(x.address for x in chunk.buffers() if x is not None), chunk.offset, len(chunk)


def _equal_rows(tensors: tuple[Tensor, ...]) -> bool:
    """Whether two rows of all tensors are equal: of those with one hash, neighbours are compared."""
    hashes = np.zeros(len(tensors[0]), dtype=np.int64)
    generator = np.random.default_rng(0)
    for x in tensors:
        if x.layout != torch.strided or x.is_complex() or not len(x):
            return False
        words = _words(x)
        factors = torch.from_numpy(generator.integers(-(2**63), 2**63, words.shape[1])).to(x.device)
        parts = words.split(max(1, _AT_ONCE // max(1, words.shape[1])))
        found = [((part.long() ^ (part.long() >> 29)) * factors).sum(1) for part in parts]
        hashes = (hashes * 31) ^ torch.cat(found).cpu().numpy()
    order = np.argsort(hashes, kind="stable")
    twice = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    one, other = (torch.from_numpy(order[twice + i][:_RECORDS_COMPARED]) for i in range(2))
    alike = [(_words(x)[one.to(x.device)] == _words(x)[other.to(x.device)]).all(1).cpu() for x in tensors]
    return bool(torch.stack(alike).all(0).any())


def _words(x: Tensor) -> Tensor:
    """The bytes of each row, as integers."""
    rows = x.detach().reshape(len(x), -1).contiguous()
    whole = rows.shape[1] * rows.element_size() % 8 == 0 and rows.dtype != torch.bool
    return rows.view(torch.int64 if whole else _WORDS[rows.element_size()])
