"""Public rows: what the checks before the first private row run on, and what they are like.

Rows are the records that a user gives, or numbers of a fixed seed in the types and shapes of a
template. A template comes from public facts where a data set states them. Elsewhere it is what most
of a few records share, so that a record unlike the others decides nothing that is checked, refused
or printed. Where two kinds are about as frequent, one record can tip the choice.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from dpkfc.data.loading import Collate, RowDataset
from dpkfc.data.loading import tensors_of as columns_of
from dpkfc.gradients.layers import tensors_of
from dpkfc.memory import is_out_of_memory
from dpkfc.rng_state import preserve_generators

_SEED = 20261125
_WORDS = ("a", "the", "good", "bad", "film", "was", "not", "very")
# Kinds of numpy's numbers to types of tensors; others are integers.
_NUMBERS = {"f": torch.float64, "b": torch.bool}
# Kinds of integers, and whether they lie in a sequence, to the least one and the bound.
_BOUNDS = {("tokens", True): (0, 4), ("ones", True): (1, 2), ("ones", False): (1, 2)}
# The same, where floating-point numbers lie in [0, 1].
_ARE_PROBABILITIES = {("ones", True), ("ones", False), ("bits", False)}


Axis = tuple[Any, ...]
"""Keys that lead to a value in a record, and a dimension of that value."""

# What the longer of two records has more: short texts may be padded to a multiple of 64 or 512.
_EXTRA_LENGTHS = (3, 35, 67, 131, 515)
# Several short records: an id in one may be the padding's.
_SHORT_RECORDS = 8
_MAX_SUBSETS = 8  # axes of one length that are made longer one by one


@dataclass(frozen=True)
class PublicRows:
    """Public records, with a function that makes batches of them.

    Attributes:
        records: the records.
        collate: list of records to a batch.
        example: what they are like.
        integers: as of `draw_public_rows`.
        are_given: whether a user has given them as `public_records`.
    """

    records: Sequence[Any]
    collate: Collate
    example: Any = None
    integers: str = "tokens"
    are_given: bool = False

    def __len__(self) -> int:
        return len(self.records)

    def batch(self, indices: Sequence[int]) -> Any:
        """Return a batch of some records."""
        return self.collate([self.records[i] for i in indices])

    def depends_on_padding(self, agree: Callable[[Any, Any], bool]) -> bool | None:
        """Return whether a longer record in the batch changes what a record gives.

        Any axis may have another length in each record, alone or with other axes of its length.

        Args:
            agree: whether the first rows of two batches give the same. What it raises says that
                the batches cannot be compared.

        Returns:
            None where batches are padded and cannot be compared.
        """
        groups: dict[int, list[Axis]] = {}
        for axis, length in _axes(self.example):
            groups.setdefault(length, []).append(axis)
        answers: set[bool | None] = set()
        for length, group in groups.items():
            for axes in _subsets(group):
                own = {_ask(agree, *pair) for pair in self._padded_pairs(axes, length)}
                answers |= own
                if own - {None}:
                    break
        if False in answers:
            return True
        return None if answers == {None} else False

    def _padded_pairs(self, axes: Sequence[Axis], length: int) -> Iterator[tuple[Any, Any]]:
        """Yield batches of a short and a longer record with the short record alone.

        The records differ along some axes, and the batch is padded to the longer one.
        """
        draw = _RecordDrawer(np.random.default_rng(_SEED), self.integers)
        extras: Sequence[int] = _EXTRA_LENGTHS
        values = {axis[:-1] for axis in axes}
        if len(values) < len(axes):
            # A volume that is longer in all directions would fill the memory.
            extras = extras[:1]
        for extra in extras:
            longer = dict.fromkeys(axes, length + extra)
            longest = draw.value_like(self.example, longer)
            is_padded = False
            for i in range(_SHORT_RECORDS):
                shorter = dict.fromkeys(axes, max(1, length // (2 + i)))
                short = draw.value_like(self.example, shorter)
                # Records of several lengths need not fit into a batch.
                with suppress(Exception):
                    batch = self.collate([short, longest])
                    is_padded = _shapes(batch) != _shapes(self.collate([short, short]))
                    if is_padded:
                        yield batch, self.collate([short])
            if is_padded:
                return


def _ask(agree: Callable[[Any, Any], bool], batch: Any, alone: Any) -> bool | None:
    """Return an answer, None where the batches cannot be compared."""
    try:
        return agree(batch, alone)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None


def warn_of_padding(stacklevel: int) -> None:
    """Warn that batches are padded, and that no records could show whether padding mixes them."""
    warnings.warn(
        "batches are padded, and the model takes no public records of other lengths; whether"
        " padding mixes examples is not checked",
        stacklevel=stacklevel + 1,
    )


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
        problem: why there is no prototype, or "".
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
            items = [_draw_item(library, source, length) for length in _LENGTHS]
            return Template([x for i, x in enumerate(items) if not _is_repeated(items, i)])
    return _read_template(RowDataset(dataset), len(dataset))


def _repeat_given(given: Sequence[Any], collate: Collate, count: int) -> PublicRows:
    rows = [given[i % len(given)] for i in range(count)]
    return PublicRows(rows, collate, given[0], are_given=True)


def _raise_problem(problem: str, _: int) -> PublicRows:
    raise TypeError(problem)


def _is_repeated(items: Sequence[Any], i: int) -> bool:
    return any([*_axes(x)] == [*_axes(items[i])] for x in items[:i])


def _read_template(records: Any, size: int) -> Template:
    """Return what most of a few private records share."""
    samples: list[tuple[Hashable, Any]] = []
    for i in np.linspace(0, size - 1, min(size, _READ_RECORDS)).astype(int).tolist():
        # What a record raises says something about that record alone.
        with suppress(Exception), preserve_generators():
            record = records[i]
            samples.append((_kind(record), record))
    if not samples:
        return Template(is_public=False, problem=UNREADABLE)
    kind = _most_common(kind for kind, _ in samples)
    alike = [record for own, record in samples if own == kind]
    lengths: dict[Axis, list[int]] = {}
    for record in alike:
        for axis, length in _axes(record):
            lengths.setdefault(axis, []).append(length)
    common = {axis: _most_common(own) for axis, own in lengths.items()}
    varied = [a for a, own in lengths.items() if own.count(common[a]) < _SAME_LENGTH * len(own)]
    draw = _RecordDrawer(np.random.default_rng(_SEED), "tokens")
    try:
        prototypes = [
            draw.value_like(alike[0], common | dict.fromkeys(varied, length))
            for length in (_LENGTHS if varied else _LENGTHS[:1])
        ]
    except TypeError as error:
        return Template(is_public=False, problem=str(error))
    return Template(prototypes, is_public=False)


def _most_common(values: Iterable[Any]) -> Any:
    """Return the most frequent value, whatever the order of the values."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], repr(value)))


def _kind(x: Any) -> Hashable:
    """Return types and ranks of a value and of what it holds, without values and lengths."""
    if isinstance(x, Tensor):
        return "tensor", x.dtype, x.dim()
    if isinstance(x, np.ndarray):
        return "array", x.dtype if x.dtype.kind in "biufc" else x.dtype.kind, x.ndim
    if isinstance(x, Mapping):
        return "mapping", tuple((key, _kind(x[key])) for key in sorted(x, key=repr))
    if _is_uniform_list(x):
        return "list of", _kind(_typical(x))
    if isinstance(x, (list, tuple)):
        return type(x), tuple(map(_kind, x))
    if _is_image(x):
        return "image", x.mode
    return "value", type(x)


def _is_image(x: Any) -> bool:
    return hasattr(x, "__array_interface__") and hasattr(x, "mode")


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
        TypeError: another feature than numbers, texts, lists, arrays and images.
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
    if dtype == "bool":
        return False
    if "int" in dtype:
        return 0
    if "float" in dtype or dtype == "double":
        return 0.0
    raise TypeError(f"no public value of a {kind}")


def draw_public_rows(record: Any, count: int, collate: Collate, integers: str) -> PublicRows:
    """Draw records with the types and shapes of a prototype.

    Args:
        record: the prototype. Its types and shapes are read, its values are not.
        count: records to draw.
        collate: list of records to a batch.
        integers: the integers to draw. "tokens" means 0 to 3 inside of sequences and 0 or 1
            elsewhere, "bits" means 0 or 1, which nearly all labels and tokens may be, and "ones"
            means 1.

    Returns:
        The records. Floating-point numbers are standard normal. With "ones" all lie in [0, 1], as
        probabilities do; with "bits" those do that are alone.

    Raises:
        TypeError: a record with a value of a type that cannot be drawn, by name.
    """
    draw = _RecordDrawer(np.random.default_rng(_SEED), integers)
    records = [draw.value_like(record) for _ in range(count)]
    return PublicRows(records, collate, record, integers)


_ELEMENTS = ((int, float), str, list, Mapping)


def _is_uniform_list(x: Any) -> bool:
    """Return whether the elements of a list are of one type, so that it may have any length."""
    return (
        isinstance(x, list)
        and len(x) > 0
        and any(all(isinstance(y, kind) for y in x) for kind in _ELEMENTS)
    )


def _typical(x: list[Any]) -> Any:
    """Return the element of a uniform list that the others are like."""
    for y in x:
        if isinstance(y, float):
            return y
    kind = _most_common(map(_kind, x))
    return next(y for y in x if _kind(y) == kind)


def _axes(x: Any, place: Axis = ()) -> Iterator[tuple[Axis, int]]:
    """Yield the axes of the tensors, lists, texts and images in a record, with their lengths."""
    for dim, length in enumerate(_shape(x)):
        yield (*place, dim), length
    for key, value in _items(x):
        yield from _axes(value, (*place, key))


def _shape(x: Any) -> Sequence[int]:
    """Return the lengths of the axes of a value."""
    if isinstance(x, (Tensor, np.ndarray)):
        return x.shape
    if isinstance(x, str):
        return (len(x.split()),)
    if _is_image(x):
        return np.asarray(x).shape[:2]
    return (len(x),) if _is_uniform_list(x) else ()


def _items(x: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a mapping, a list or a tuple; of a uniform list, one value."""
    if isinstance(x, Mapping):
        return x.items()
    if _is_uniform_list(x):
        return [(0, _typical(x))]
    return enumerate(x) if isinstance(x, (list, tuple)) else ()


def _subsets(axes: list[Axis]) -> Iterator[Sequence[Axis]]:
    """Yield axes of one length: all of them, all but one, and one. They may be so by chance."""
    yield axes
    if 1 < len(axes) <= _MAX_SUBSETS:
        yield from reversed([*combinations(axes, len(axes) - 1)])
        yield from combinations(axes, 1)


def unwrap_containers(batch: Any) -> Any:
    """Return a batch with dicts and lists in place of other mappings and sequences.

    torch does not find tensors inside of those.
    """
    if isinstance(batch, Mapping):
        return {key: unwrap_containers(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [unwrap_containers(value) for value in batch]
    return batch


def _shapes(batch: Any) -> list[torch.Size]:
    return [x.shape for x in tensors_of(unwrap_containers(batch)) if not x.is_nested]


@dataclass(frozen=True)
class _RecordDrawer:
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
            dtype = _NUMBERS.get(np.asarray(x).dtype.kind, torch.int64)
            number = self._tensor(dtype, []).item()
            return type(x)(number) if isinstance(x, np.generic) else number
        if x is None:
            return None
        if isinstance(x, str) and self.integers != "ones":
            return type(x)(" ".join(self.generator.choice(_WORDS, shape)))
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
            return [self.value_like(like, sizes, (*place, 0)) for _ in range(*shape)]
        values = {key: self.value_like(y, sizes, (*place, key)) for key, y in _items(x)}
        if isinstance(x, Mapping):
            return values
        if hasattr(x, "_fields"):
            return type(x)(*values.values())
        return type(x)(values.values())

    def _image(self, x: Any, shape: Sequence[int]) -> Any:
        channels = np.asarray(x).shape[2:]
        pixels = self.generator.integers(0, 256, (*shape, *channels), dtype=np.uint8)
        if hasattr(type(x), "fromarray"):
            return type(x).fromarray(pixels)
        from PIL import Image

        return Image.fromarray(pixels)

    def _tensor(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        kind = (self.integers, bool(shape))
        if dtype.is_floating_point or dtype.is_complex:
            draw: Callable[[Any], Any] = self.generator.standard_normal
            if kind in _ARE_PROBABILITIES:
                draw = self.generator.random
            return torch.as_tensor(draw(shape)).to(dtype)
        least, bound = _BOUNDS.get(kind, (0, 2))
        if dtype == torch.bool:
            least, bound = 0, 2
        values = self.generator.integers(least, bound, size=shape)
        return torch.as_tensor(values).to(dtype)
