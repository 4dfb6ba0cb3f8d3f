"""Image sets of the papers: CIFAR-100 as a task, PathMNIST, SVHN and UTKFace."""

from __future__ import annotations

import gzip
import io
import math
import re
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import scipy

from dpkfc._errors import one_line
from dpkfc.app.datasets.cifar import decode_delta
from dpkfc.app.datasets.errors import DatasetError, damaged_error, unreadable_error
from dpkfc.app.datasets.examples import Split
from dpkfc.app.datasets.pixels import check_labels, check_pixels, hold_out
from dpkfc.app.datasets.sources import CIFAR100, Source, medmnist_source, read_arrays
from dpkfc.app.datasets.unpacking import BoundedStream, UnpackedSizeError, check_unpacked_size

CIFAR100_TASK = replace(
    CIFAR100,
    hub="uoft-cs/cifar100",
    image_column="img",
    label_column="fine_label",
    whole=50_000,
)
PATH = medmnist_source("PathMNIST")

# --------------------------------------------------------------------------------------------------
# SVHN, house numbers cropped to single digits (Netzer et al. 2011): MATLAB files with `X` `[32, 32,
# 3, N]` and `y` `[N, 1]`.

_BYTES = {
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "single": 4,
    "double": 8,
}


def read_svhn(path: Path) -> Split:
    """Read one split of SVHN.

    Returns:
        Images uint8 `[N, 32, 32, 3]` and digits `[N]`. The files hold 10 for a zero.

    Raises:
        DatasetError: the file cannot be read, is not a MATLAB file, lacks an array, or an array has
            another shape or type.
        UnpackedSizeError: the arrays are larger than the limit of `check_unpacked_size`.
    """
    try:
        with path.open("rb") as file:
            check_unpacked_size(path, _unpacked_size(file))
            file.seek(0)
            arrays = scipy.io.loadmat(file, variable_names=("X", "y"))
    except UnpackedSizeError:
        raise
    except OSError as error:
        raise unreadable_error(path, error) from None
    # Scipy raises many kinds of errors for damaged files.
    except Exception as error:
        what = f"is not a whole MATLAB file of version 5 ({one_line(error)})"
        raise damaged_error(path, what) from None
    if not arrays.keys() >= {"X", "y"}:
        raise damaged_error(path, "lacks the arrays `X` and `y`")
    images, labels = arrays["X"], arrays["y"]
    if images.dtype != np.uint8 or images.ndim != 4:
        raise damaged_error(
            path, f"`X` is {images.dtype} {images.shape} where uint8 (32, 32, 3, N) was expected"
        )
    if labels.dtype.kind not in "iu" or (labels.size,) != images.shape[3:]:
        raise damaged_error(
            path,
            f"`y` is {labels.dtype} {labels.shape} where one whole number an image was expected",
        )
    digits = labels.reshape(-1).astype(np.int64)
    digits = np.where(digits == 10, 0, digits)
    return np.ascontiguousarray(np.moveaxis(images, 3, 0)), digits


def _unpacked_size(file: IO[bytes]) -> int:
    """Return the bytes of `X` and `y` as the headers of the file say.

    Raises:
        ValueError: one of them is not an array of numbers.
    """
    size = 0
    for name, shape, kind in scipy.io.whosmat(file):
        if name not in ("X", "y"):
            continue
        if kind not in _BYTES:
            raise ValueError(f"{name} is a {kind}, not an array of numbers")
        size += math.prod(shape) * _BYTES[kind]
    return size


SVHN = Source(
    name="SVHN",
    folder="svhn",
    files=("train_32x32.mat", "test_32x32.mat"),
    read=lambda paths: (read_svhn(paths[0]), read_svhn(paths[1])),
    hub="ufldl-stanford/svhn",
    hub_config="cropped_digits",
    whole=73_257,
)


# --------------------------------------------------------------------------------------------------
# UTKFace, faces with age, gender and race, at 32×32: the authors' archive of JPEG files, or an
# `.npz` of reduced images.
#
# The `.npz` holds `delta`, as the archives of CIFAR-10 do, and `race`. The archive names each file
# `AGE_GENDER_RACE_DATE.jpg.chip.jpg`; a few names lack the race and are left out. There is no
# official split: a tenth is held out by a public permutation.

SIDE = 32
_GZIP = b"\x1f\x8b"
_NAMED = re.compile(r"(?:.*/)?\d+_[01]_([0-4])_\d+\.jpg(?:\.chip\.jpg)?")


def read_utkface(path: Path) -> Split:
    """Read all faces with their race.

    Args:
        path: `subset.npz`, or the archive of JPEG files, packed or unpacked by gzip alone.

    Returns:
        Images uint8 `[N, 32, 32, 3]`, and labels `[N]`: 0 White, 1 Black, 2 Asian, 3 Indian, 4
        others.

    Raises:
        DatasetError: the file cannot be read, is damaged, or holds no faces.
        UnpackedSizeError: the file unpacks to more than the limit of `check_unpacked_size`.
    """
    return _read_face_arrays(path) if path.suffix == ".npz" else _read_face_archive(path)


def _read_face_arrays(path: Path) -> Split:
    arrays = read_arrays(path, ["delta", "race"])
    delta, labels = arrays["delta"], arrays["race"]
    check_labels(path, "race", labels)
    check_pixels(path, "delta", delta, (3, len(labels), SIDE, SIDE))
    return decode_delta(delta), labels


def _read_face_archive(path: Path) -> Split:
    """Return the faces in the order of file names, which is equal in every copy of the archive."""
    faces = []
    what = "is not a whole archive of JPEG files"
    try:
        with path.open("rb") as file, _unpack(file) as stream:
            reader = io.BufferedReader(BoundedStream(stream, path))
            archive = tarfile.open(fileobj=reader, mode="r|")
            for member in archive:
                name = _NAMED.fullmatch(member.name)
                if name is None or not member.isfile():
                    continue
                image = archive.extractfile(member)
                if image is not None:
                    pixels = _reduce(io.BytesIO(image.read()))
                    faces.append((Path(member.name).name, pixels, int(name[1])))
    except OSError as error:
        if error.errno:
            raise unreadable_error(path, error) from None
        raise damaged_error(path, f"{what} ({error})") from None
    except (DatasetError, UnpackedSizeError):
        raise
    # Tarfile, zlib and Pillow raise many kinds of errors for damaged files.
    except Exception as error:
        raise damaged_error(path, f"{what} ({one_line(error)})") from None
    if not faces:
        raise damaged_error(path, "holds no file of the form AGE_GENDER_RACE_DATE.jpg")
    faces.sort(key=lambda face: face[0])
    images = np.stack([pixels for _, pixels, _ in faces])
    return images, np.array([race for _, _, race in faces], np.int64)


def _unpack(file: IO[bytes]) -> IO[bytes]:
    """Return the archive as a stream, unpacked where its first bytes are gzip's."""
    packed = file.read(2) == _GZIP
    file.seek(0)
    return cast("IO[bytes]", gzip.GzipFile(fileobj=file)) if packed else file


def _reduce(file: Any) -> np.ndarray:
    """Return one JPEG file as uint8 `[32, 32, 3]`, each pixel the mean of those it replaces."""
    try:
        from PIL import Image
    except ImportError:
        raise DatasetError(
            "faces of UTKFace are JPEG files, and Pillow is not installed: pip install '.[data]'"
        ) from None
    with Image.open(file) as image:
        small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)
        return np.asarray(small)


def _split_utkface(paths: list[Path]) -> tuple[Split, ...]:
    images, labels = read_utkface(paths[0])
    return hold_out(images, labels, len(labels) // 10)


UTKFACE = Source(
    name="UTKFace",
    folder="utkface",
    files=("UTKFace.tar.gz or subset.npz",),
    read=_split_utkface,
    whole=21_335,
)
