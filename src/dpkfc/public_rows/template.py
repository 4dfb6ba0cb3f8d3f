"""Find what the records of a data set are like.

A template comes from public facts where a data set states them. Elsewhere it is what most of a few
records share, so that a record unlike the others decides nothing that is checked, refused or
printed. Where two kinds are about as frequent, one record can tip the choice.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from dpkfc.data.loading import Collate, RowDataset
from dpkfc.data.loading import tensors_of as columns_of
from dpkfc.public_rows.record_drawing import SEED, Axis, RecordDrawer, axes_of, kind_of, most_common
from dpkfc.public_rows.rows import PublicRows, draw_public_rows
from dpkfc.rng_state import preserve_generators

Attempts = Sequence[Callable[[int], PublicRows]]
"""Each maps a number of records to public rows; the first rows that a loss accepts are used."""


UNREADABLE = "no record can be read"
# Records that are read where no public fact says what records are like.
_READ_RECORDS = 16
# The share of these that must have one length; otherwise a length follows the record.
_SAME_LENGTH = 0.75
# Lengths of public rows where lengths follow the record; the first that a loss accepts is used.
_LENGTHS = (7, 3, 64, 256)


@dataclass(frozen=True)
class Template:
    """What the records of a data set are like: their types and shapes, and no value of any.

    Attributes:
        prototypes: records without private values. They differ in lengths that follow the record.
        is_public: whether public facts have told it, and no private record.
        given: public records, which are used themselves; they leave no prototype.
        problem: why no prototype could be made, or "".
    """

    prototypes: Sequence[Any] = ()
    is_public: bool = True
    given: Sequence[Any] = ()
    problem: str = ""

    def attempts(self, collate: Collate, device: torch.device) -> Attempts:
        """Return ways to make public rows, with several choices of integers and lengths."""
        if len(self.given):
            return [partial(_repeat_given, self.given, collate)]
        if self.problem:
            return [partial(_raise_problem, self.problem)]
        kinds = ["bits", "ones"]
        if device.type == "cpu":
            kinds = ["tokens", *kinds]  # a wrong label would end a CUDA process
        return [
            partial(draw_public_rows, prototype, collate=collate, integers=kind)
            for prototype in self.prototypes
            for kind in kinds
        ]

    def warn(self, stacklevel: int) -> None:
        """Warn where private records have told the types, in the same words for all records.

        Args:
            stacklevel: as of `warnings.warn`, from the caller.
        """
        if not self.is_public:
            warnings.warn(
                "public rows take their types from what most of a few private records share; state"
                " them by public_records=, tensors or features (docs/errors.md#public-rows)",
                stacklevel=stacklevel + 1,
            )


def find_template(dataset: Any, public_records: Sequence[Any] | None = None) -> Template:
    """Return what the records of a data set are like, and whether that is public.

    Args:
        dataset: a map-style data set, or a tuple of tensors. Shapes of tensors and the features of
            a Hugging Face data set are public. Of any other data set a few records are read, and
            one with other types or lengths than most of them has no effect.
        public_records: records that are not private, None without any.
    """
    if public_records is not None:
        return Template(given=public_records)
    source = dataset
    while type(source) is Subset:
        source = source.dataset
    columns = columns_of(source)
    if columns is not None and not any(x.is_nested for x in columns):
        return Template([tuple(torch.zeros(x.shape[1:], dtype=x.dtype) for x in columns)])
    library = sys.modules.get("datasets")
    if library is not None and isinstance(source, library.Dataset):
        # A feature without a public value, or a transform that refuses one.
        with suppress(Exception), preserve_generators():
            items: dict[tuple[Any, ...], Any] = {}
            for length in _LENGTHS:
                item = _draw_item(library, source, length)
                items.setdefault(tuple(axes_of(item)), item)
            return Template(list(items.values()))
    return _read_template(RowDataset(dataset), len(dataset))


def _repeat_given(given: Sequence[Any], collate: Collate, count: int) -> PublicRows:
    rows = [given[i % len(given)] for i in range(count)]
    return PublicRows(rows, collate, given[0], are_given=True)


def _raise_problem(problem: str, _: int) -> PublicRows:
    raise TypeError(problem)


def _read_template(records: Any, size: int) -> Template:
    """Return what most of a few private records share."""
    samples: list[tuple[Hashable, Any]] = []
    for i in np.linspace(0, size - 1, min(size, _READ_RECORDS)).astype(int).tolist():
        # What a record raises says something about that record alone.
        with suppress(Exception), preserve_generators():
            record = records[i]
            samples.append((kind_of(record), record))
    if not samples:
        return Template(is_public=False, problem=UNREADABLE)
    kind = most_common(kind for kind, _ in samples)
    alike = [record for own, record in samples if own == kind]
    lengths: dict[Axis, list[int]] = {}
    for record in alike:
        for axis, length in axes_of(record):
            lengths.setdefault(axis, []).append(length)
    common = {axis: most_common(own) for axis, own in lengths.items()}
    varied = []
    for axis, own in lengths.items():
        if own.count(common[axis]) < _SAME_LENGTH * len(own):
            varied.append(axis)
    draw = RecordDrawer(np.random.default_rng(SEED), "tokens")
    prototypes = []
    try:
        for length in _LENGTHS if varied else _LENGTHS[:1]:
            sizes = common | dict.fromkeys(varied, length)
            prototypes.append(draw.value_like(alike[0], sizes))
    except TypeError as error:
        return Template(is_public=False, problem=str(error))
    return Template(prototypes, is_public=False)


def _draw_item(library: Any, dataset: Any, length: int) -> Any:
    """Return an item as a Hugging Face data set of these features and this format gives it."""
    row = {name: _draw_feature(x, length) for name, x in dataset.features.items()}
    one = library.Dataset.from_list([row], features=dataset.features)
    form = dataset.format
    one.set_format(
        form["type"], form["columns"], form["output_all_columns"], **form["format_kwargs"]
    )
    return one[0]


def _draw_feature(feature: Any, length: int) -> Any:
    """Return a value of a feature.

    Args:
        feature: of `datasets.Features`.
        length: of lists and texts without a public length, and of the sides of an image.

    Raises:
        TypeError or ValueError: another feature than numbers, texts, lists, arrays and images.
    """
    kind = type(feature).__name__
    if isinstance(feature, dict):
        return {name: _draw_feature(x, length) for name, x in feature.items()}
    if kind in ("List", "LargeList", "Sequence"):
        fixed = getattr(feature, "length", -1)
        count = length if fixed < 0 else fixed
        return [_draw_feature(feature.feature, length) for _ in range(count)]
    if kind.startswith("Array"):
        return np.zeros([length if n is None else n for n in feature.shape]).tolist()
    if kind == "Image":
        from PIL import Image

        return Image.new(feature.mode or "RGB", (length, length))
    dtype = str(feature.dtype)
    if "string" in dtype:
        return " ".join(["a"] * length)
    return np.zeros((), dtype).item()
