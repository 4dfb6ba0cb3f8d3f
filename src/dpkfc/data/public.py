"""Do a public and a private dataset share rows? Curvature of a private example is no public curvature.

Rows are compared by a hash of the bytes of every tensor or number in their input, so equal rows are found, and near-duplicates
(another crop, another precision) are not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from dpkfc.data.loader import tensors_of

__all__ = ["check_disjoint", "check_probes", "digest", "in_memory", "shared_rows"]

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
        preconditioner: its `probe` and `output_probe` are looked at, if they hold `inputs`.
        private: the dataset.

    Raises:
        ValueError: as `check_disjoint`.
    """
    if not in_memory(private):
        return
    for role in ("probe", "output_probe"):
        inputs = getattr(getattr(preconditioner, role, None), "inputs", None)
        if inputs is not None:
            check_disjoint(inputs, private, f"the {role.replace('_', ' ')} of {type(preconditioner).__name__}")


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
