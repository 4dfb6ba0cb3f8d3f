"""The tensors that a run trains on and is evaluated on, and the readers of their files."""

from __future__ import annotations

import gzip
import importlib
import io
import lzma
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

if TYPE_CHECKING:
    # `dpkfc schema` starts without torch.
    from torch import Tensor

# --------------------------------------------------------------------------------------------------
# A limit on the bytes that a file from outside may hold once it is unpacked: a packed file of 2 MiB
# can unpack to gigabytes. Readers compare the size with the limit before they take the memory.

VARIABLE = "DPKFC_MAX_UNPACKED_GIB"
_DEFAULT = 2.0
_GIB = 1 << 30


class UnpackedSizeError(ValueError):
    """A file that is larger than the limit once it is unpacked."""


def check_unpacked_size(path: Path, size: int) -> None:
    """Raise if a file unpacks to more than the limit.

    The environment variable DPKFC_MAX_UNPACKED_GIB sets the limit.

    Args:
        path: the file.
        size: bytes that the file unpacks to, as its headers say or as counted so far.

    Raises:
        UnpackedSizeError: the size is above the limit (2 GiB by default), or the variable is not a
            positive number.
    """
    text = os.environ.get(VARIABLE, str(_DEFAULT))
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not limit > 0:
        raise UnpackedSizeError(
            f"{VARIABLE}={text!r:.40} is not a positive number of GiB; set it to 4, for example"
        )
    if size > limit * _GIB:
        raise UnpackedSizeError(
            f"{path.name:.50} unpacks to {size / _GIB:.2f} GiB or more, above {limit:g} GiB; set"
            f" {VARIABLE} higher to read it"
        )


class BoundedStream(io.RawIOBase):
    """Read an unpacked stream and raise once it has given more bytes than the limit.

    Args:
        stream: gives the unpacked bytes; the caller closes it.
        path: the packed file, for the message.
    """

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self._stream, self._path, self._count = stream, path, 0

    def readable(self) -> bool:
        """Return True: this is what `io.BufferedReader` asks for."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer and return the number of bytes, 0 at the end.

        Raises:
            UnpackedSizeError: the stream has given more than the limit.
        """
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._count += len(data)
        check_unpacked_size(self._path, self._count)
        return len(data)


# --------------------------------------------------------------------------------------------------
# Examples, and the readers of their files.

Examples: TypeAlias = "tuple[Tensor, Tensor]"
# Pixels and labels as files hold them.
Split = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class ExampleSet:
    """Examples that a run trains on and is evaluated on.

    Attributes:
        train: inputs `[N, ...]` and labels `[N]`, the private examples.
        test: the same for the test split.
        validation: examples cut from the training set by a public seed, or the set's own validation
            split, or None.
        source: where they were read from.
        part: how much of the data set they are, where files hold a part of it. No published number
            can then be compared.
        units: a number for the person (or other unit) of each training example `[N]`, or None
            where ε protects single examples.
        figures: shares of values that a schema clamped, or did not know. PRIVATE.
    """

    train: Examples
    test: Examples
    validation: Examples | None = None
    source: str = ""
    part: str = ""
    units: Tensor | None = None
    figures: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def map_splits(self, change: Callable[[str, Examples], Examples], **others: Any) -> ExampleSet:
        """Return the set with a change of every split, and of other attributes.

        Args:
            change: maps the name of a split ("training", "test" or "validation") and its examples.
            others: the other attributes.
        """
        validation = self.validation
        if validation is not None:
            validation = change("validation", validation)
        return replace(
            self,
            train=change("training", self.train),
            test=change("test", self.test),
            validation=validation,
            **others,
        )

    @property
    def size(self) -> int:
        """Number N of training examples, or of their units."""
        return len(self.train[1]) if self.units is None else len(self.units.unique())


# --------------------------------------------------------------------------------------------------
# The error of the readers, which names the file and the fix.


class DatasetError(ValueError):
    """A data set that is missing, damaged, or another than its name says."""


def damaged_error(path: Path, what: str) -> DatasetError:
    """Return the error for a file that exists and cannot be used.

    Args:
        path: the file.
        what: what is wrong with it, as the end of a sentence that begins with the file.
    """
    return DatasetError(
        f"{path}: {what}; the file is damaged or not the right one: fetch it again or replace it"
    )


def refuse_damaged(path: Path, checks: Iterable[tuple[object, str]]) -> None:
    """Raise the error for a damaged file with what the first check that applies says."""
    for applies, what in checks:
        if applies:
            raise damaged_error(path, what)


def unreadable_error(path: Path, error: OSError) -> DatasetError:
    """Return the error for a file that the system cannot read."""
    if isinstance(error, FileNotFoundError):
        return DatasetError(f"{path}: does not exist; check the name")
    reason = error.strerror or error
    return DatasetError(f"{path}: cannot be read ({reason}); check the name and its permissions")


def import_optional(name: str, missing: str) -> Any:
    """Return a module of an optional package.

    Args:
        name: of the module.
        missing: the error where it is not installed, with the command that installs it.

    Raises:
        DatasetError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise DatasetError(missing) from None


def one_line(error: Exception) -> str:
    """Return the text of an error on one line, or its type where it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: Exception) -> str:
    """Return the first line of an error, or its type where it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0]


# --------------------------------------------------------------------------------------------------
# A validation split cut from the training set by a public seed.


def split(train: Examples, size: int | float, seed: int = 0) -> tuple[Examples, Examples]:
    """Cut a validation set from training examples.

    The cut depends on the number of examples and the seed alone, so it is the same for every run,
    method and machine.

    Args:
        train: inputs `[N, ...]` and labels `[N]`.
        size: number of validation examples, or a fraction of N when it is a float in (0, 1).
        seed: public seed of the permutation.

    Returns:
        The remaining training examples and the validation examples.

    Raises:
        DatasetError: the cut would leave one of the two sets empty.
    """
    import torch

    inputs, labels = train
    total = len(labels)
    count = round(size * total) if isinstance(size, float) else size
    if not 0 < count < total:
        raise DatasetError(
            f"validation_size = {size} leaves nothing to train or validate on: choose 1 to"
            f" {total - 1}"
        )
    order = torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).permutation(total))
    held_out = order[:count].sort().values
    kept = order[count:].sort().values
    return (inputs[kept], labels[kept]), (inputs[held_out], labels[held_out])


def split_off_validation(data: ExampleSet, size: int, seed: int = 0) -> ExampleSet:
    """Return the data with `size` examples moved from training to validation."""
    if size == 0:
        return data
    train, validation = split(data.train, size, seed)
    return replace(data, train=train, validation=validation)


# --------------------------------------------------------------------------------------------------
# Arrays of plain numbers from `.npz` files, which are zip archives of `.npy` files.
#
# An array is checked before it is read: its header must describe numbers and promise exactly the
# bytes that the archive holds. Anything else that numpy can store, such as Python objects, is
# refused.

_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    r"\{'descr': '([|<>=]?(?:b1|[iu][1248]|f[248]))', 'fortran_order': (False|True), "
    r"'shape': \(((?:\d{1,18}, ?)*(?:\d{1,18})?)\), \}\s*"
)
# Errors of zipfile for archives that are damaged, encrypted, or packed in an unknown way.
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    ValueError,
    RuntimeError,
    struct.error,
    OverflowError,
)


def read_npz(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return the arrays of these names that a file holds.

    Raises:
        DatasetError: the file cannot be read, is not a whole zip archive, or one of these arrays
            does not hold numbers.
        UnpackedSizeError: these arrays are larger than the limit of `check_unpacked_size`.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
            present = [name for name in names if f"{name}.npy" in sizes]
            check_unpacked_size(path, sum(sizes[f"{name}.npy"] for name in present))
            return {name: _array(archive, f"{name}.npy") for name in present}
    except UnpackedSizeError:
        raise
    except _BROKEN as error:
        raise damaged_error(path, f"is not a whole npz file ({one_line(error)})") from None
    except OSError as error:
        raise unreadable_error(path, error) from None


def _array(archive: zipfile.ZipFile, member: str) -> np.ndarray:
    """Return one array, or raise a ValueError that says what is wrong with it."""
    with archive.open(member) as file:
        descr, is_fortran, shape = _read_header(file, member)
        dtype = np.dtype(descr)
        size = math.prod(shape) * dtype.itemsize
        if archive.getinfo(member).file_size - file.tell() != size:
            raise ValueError(f"{member} is shorter or longer than its header says")
        content = file.read()
    if len(content) != size:
        raise ValueError(f"{member} is cut short")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if is_fortran else "C")


def _read_header(file: IO[bytes], member: str) -> tuple[str, bool, tuple[int, ...]]:
    """Return the type of the numbers, whether they lie in Fortran's order, and the shape."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError(f"{member} is no npy file of version 1")
    (length,) = struct.unpack("<H", file.read(2))
    header = _HEADER.fullmatch(file.read(length).decode("latin-1"))
    if header is None:
        raise ValueError(f"{member} does not hold plain numbers")
    descr, fortran, shape = header.groups()
    sizes = tuple(int(size) for size in shape.replace(",", " ").split())
    return descr, fortran == "True", sizes


# --------------------------------------------------------------------------------------------------
# IDX files, the container of MNIST and Fashion-MNIST.
#
# An IDX file is a big-endian header (two zero bytes, a type code, the number of axes, one 32-bit
# size per axis) and then the elements in row-major order. Only unsigned bytes (type code 8) occur
# here.

_MAGIC_OF_BYTES = b"\0\0\x08"


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes, gzipped when its name ends in `.gz`.

    Args:
        path: the file.
        axes: number of axes it must have: 3 for images, 1 for labels.

    Returns:
        A uint8 array of the sizes in the header.

    Raises:
        DatasetError: the file cannot be read, is not a gzip file, ends too early, has another magic
            number, another number of axes, or a length that contradicts its header.
        UnpackedSizeError: the file unpacks to more than the limit of `check_unpacked_size`.
    """
    content = _read_bytes(path)
    start = 4 + 4 * axes
    header = content[:start].ljust(start, b"\0")
    shape = struct.unpack(f">{axes}I", header[4:])
    expected = start + math.prod(shape)
    too_short = f"holds {len(content)} bytes, too few for an IDX header"
    refuse_damaged(
        path,
        [
            (len(content) < 4, too_short),
            (
                header[:3] != _MAGIC_OF_BYTES,
                f"begins with 0x{content[:4].hex()}, not with the magic number of an IDX file of"
                " bytes",
            ),
            (header[3] != axes, f"has {header[3]} axes where {axes} were expected"),
            (len(content) < start, too_short),
            (
                len(content) != expected,
                f"holds {len(content)} bytes where its header {shape} promises {expected}",
            ),
            (0 in shape, f"holds nothing: its header says {shape}"),
        ],
    )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _read_bytes(path: Path) -> bytes:
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with path.open("rb") as file:
            stream = cast("IO[bytes]", gzip.GzipFile(fileobj=file))
            return io.BufferedReader(BoundedStream(stream, path)).read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise damaged_error(path, f"is not a whole gzip file ({error})") from None
    except OSError as error:
        raise unreadable_error(path, error) from None


# --------------------------------------------------------------------------------------------------
# CIFAR-10 from a compact `.npz`: planes of colour differences, differenced once along rows and once
# along columns.
#
# `delta` is uint8 `[3, N, 32, 32]` with wrap-around; summed up along both image axes it gives the
# planes G, R − G, B − G. `y` holds the labels. A plain `x` `[N, 32, 32, 3]` of uint8 in place of
# `delta` is taken as it is.


def decode_delta(delta: np.ndarray) -> np.ndarray:
    """Return RGB images uint8 `[N, H, W, 3]` of an encoded array uint8 `[3, N, H, W]`."""
    planes = np.cumsum(delta, axis=2, dtype=np.uint8)
    np.cumsum(planes, axis=3, dtype=np.uint8, out=planes)
    green, red, blue = planes
    return np.stack([red + green, green, blue + green], axis=-1)


def read_cifar(path: Path) -> Split:
    """Read one split of CIFAR-10.

    Args:
        path: an `.npz` with `delta` (or `x`) and `y`.

    Returns:
        Images uint8 `[N, 32, 32, 3]` and labels `[N]`, whole numbers.

    Raises:
        DatasetError: the file cannot be read, is not a zip file, lacks an array, or an array has
            another shape or type.
    """
    arrays = read_npz(path, ("delta", "x", "y"))
    if "y" not in arrays or not {"delta", "x"} & set(arrays):
        raise damaged_error(
            path, f"holds the arrays {sorted(arrays)} where `delta` and `y` were expected"
        )
    labels = arrays["y"]
    check_labels(path, "y", labels)
    if "delta" in arrays:
        check_pixels(path, "delta", arrays["delta"], (3, len(labels), 32, 32))
        images = decode_delta(arrays["delta"])
    else:
        images = arrays["x"]
    check_pixels(path, "x", images, (len(labels), 32, 32, 3))
    return images, labels


def check_labels(path: Path, name: str, labels: np.ndarray) -> None:
    """Refuse labels that are not whole numbers `[N]`."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise damaged_error(
            path,
            f"`{name}` is {labels.dtype} {labels.shape} where whole numbers, one for each image,"
            " were expected",
        )


def check_pixels(path: Path, name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    """Refuse an array that is not uint8 of a shape."""
    if array.dtype != np.uint8 or array.shape != shape:
        raise damaged_error(
            path, f"`{name}` is {array.dtype} {array.shape} where uint8 {shape} was expected"
        )


# --------------------------------------------------------------------------------------------------
# Image sets: raw pixels with labels, and the tensors that a run trains on.


@dataclass(frozen=True)
class Normalisation:
    """Public constants: `(pixel / scale − mean) / std` per channel.

    Attributes:
        mean: one number per channel.
        std: one number per channel.
        scale: the largest pixel value of the format.
        origin: where the constants come from; the privacy card states it.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 255.0
    origin: str = "published constants"

    def apply(self, pixels: np.ndarray) -> Tensor:
        """Return a float32 tensor `[N, C, H, W]` of pixels `[N, H, W, C]`."""
        import torch

        mean = torch.tensor(self.mean).view(-1, 1, 1)
        std = torch.tensor(self.std).view(-1, 1, 1)
        images = torch.from_numpy(np.ascontiguousarray(np.moveaxis(pixels, -1, 1), np.float32))
        return images.div_(self.scale).sub_(mean).div_(std)


@dataclass(frozen=True)
class Splits:
    """What files hold of a training and a test split, and of the set's own validation split.

    Attributes:
        train: the training split.
        test: the same for the test split.
        source: where they were read from, for the privacy card.
        validation: the same for the set's own validation split, or None.
        part: how much of the set the files hold, where that is not all of it.
    """

    train: Any
    test: Any
    source: str
    validation: Any = None
    part: str = ""

    def convert(self, change: Callable[[Any], Examples]) -> ExampleSet:
        """Return the examples that each split becomes."""
        return ExampleSet(
            train=change(self.train),
            test=change(self.test),
            validation=change(self.validation) if self.validation else None,
            source=self.source,
            part=self.part,
        )


class Pixels(Splits):
    """Splits of pixels uint8 `[N, H, W, C]` and labels `[N]`."""

    def check(self, name: str, shape: tuple[int, ...], num_classes: int) -> Pixels:
        """Return these pixels, or refuse them where a recipe expects others.

        Args:
            name: of the data set, for the error.
            shape: `(H, W, C)` of an image.
            num_classes: labels must lie in `0 … num_classes − 1`.

        Raises:
            DatasetError: another shape, another number of labels than images, no images, or a label
                out of range.
        """
        self._check(name, shape, num_classes)
        return self

    def _check(self, name: str, shape: tuple[int, ...], num_classes: int) -> None:
        parts = {"training": self.train, "test": self.test}
        if self.validation:
            parts["validation"] = self.validation
        for part, (images, labels) in parts.items():
            where = f"{name}, {part} split from {self.source}"
            if images.shape[1:] != shape:
                raise DatasetError(
                    f"{where}: images are {images.shape[1:]}, expected {shape}; replace the files"
                )
            if labels.shape != (len(images),):
                raise DatasetError(
                    f"{where}: {len(images)} images and labels of shape {labels.shape}; the two"
                    " files do not belong together: replace them"
                )
            if len(images) == 0:
                raise DatasetError(f"{where}: no examples; replace the files")
            least, most = int(labels.min()), int(labels.max())
            if least < 0 or most >= num_classes:
                raise DatasetError(
                    f"{where}: labels run from {least} to {most}, expected 0 to {num_classes - 1}; "
                    "replace the label file"
                )

    def tensors(self, normalisation: Normalisation) -> ExampleSet:
        """Return normalised float32 images `[N, C, H, W]` and int64 labels `[N]`."""

        def convert(part: Split) -> Examples:
            import torch

            images, labels = part
            return normalisation.apply(images), torch.from_numpy(np.asarray(labels, np.int64))

        return self.convert(convert)


# --------------------------------------------------------------------------------------------------
# The 8×8 digits that scikit-learn carries: real data without a download.

TEST_SIZE = 360
_SPLIT_SEED = 0


def read_digits() -> Pixels:
    """Return training and test images of the digits, split by a fixed public permutation.

    Returns:
        1,437 training and 360 test images, uint8 0–16, `[N, 8, 8, 1]`.

    Raises:
        DatasetError: scikit-learn is not installed.
    """
    missing = "the digits come with scikit-learn: pip install scikit-learn"
    stored = import_optional("sklearn.datasets", missing).load_digits()
    images = stored.images.astype(np.uint8)[..., None]
    labels = stored.target.astype(np.int64)
    train, test = hold_out(images, labels, TEST_SIZE)
    return Pixels(train, test, source="scikit-learn load_digits()")


def hold_out(images: np.ndarray, labels: np.ndarray, count: int) -> tuple[Split, Split]:
    """Return training and test split, of which the test split takes `count` examples.

    The permutation is public and fixed.
    """
    order = np.random.Generator(np.random.PCG64(_SPLIT_SEED)).permutation(len(labels))
    test, train = order[:count], order[count:]
    return (images[train], labels[train]), (images[test], labels[test])
