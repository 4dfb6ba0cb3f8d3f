"""MedMNIST files: one `.npz` with images and labels of a training, a validation and a test split (Yang et al. 2023)."""

from __future__ import annotations

import gzip
import io
import math
import re
import tarfile
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from scipy.io import loadmat, whosmat

from dpkfc.app.datasets.formats import DatasetError, damaged, decode_delta, read_npz, unreadable
from dpkfc.app.datasets.sources import Source
from dpkfc.app.unpack_limit import BoundedStream, UnpackedSizeError, check_unpacked_size

_SPLITS = ("train", "test", "val")


def read_medmnist(path: Path) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Training, test and validation split.

    Returns:
        Images uint8 `[N, H, W, C]` (C is 1 for grey ones) and labels `[N]` of each.

    Raises:
        DatasetError: the file cannot be read, lacks an array, or an array has another shape or type.
    """
    names = [f"{split}_{what}" for split in _SPLITS for what in ("images", "labels")]
    arrays = read_npz(path, names)
    if missing := [name for name in names if name not in arrays]:
        raise damaged(path, f"lacks the arrays {', '.join(missing)}")
    return tuple(_split(path, split, arrays) for split in _SPLITS)


def _split(path: Path, split: str, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise damaged(path, f"`{split}_images` is {images.dtype} {images.shape} where uint8 images were expected")
    if labels.dtype.kind not in "iu" or labels.shape not in ((len(images), 1), (len(images),)):
        raise damaged(path, f"`{split}_labels` is {labels.dtype} {labels.shape} where one whole number an image was expected")
    return (images[..., None] if images.ndim == 3 else images), labels.reshape(-1)


def _source(name: str) -> Source:
    def read(paths: list[Path]) -> tuple[Any, ...]:
        return read_medmnist(paths[0])

    return Source(name=name, folder="medmnist", files=(f"{name.lower()}.npz",), read=read)


PNEUMONIA, BREAST, PATH = _source("PneumoniaMNIST"), _source("BreastMNIST"), _source("PathMNIST")


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


def read_svhn(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read one split.

    Returns:
        Images uint8 `[N, 32, 32, 3]` and digits `[N]`; the files say 10 for a zero.

    Raises:
        DatasetError: the file cannot be read, is no MATLAB file, lacks an array, or an array has another shape or type.
        UnpackedSizeError: the arrays are larger than the limit of `unpack_limit`.
    """
    try:
        with path.open("rb") as file:
            check_unpacked_size(path, _unpacked_size(file))
            file.seek(0)
            arrays = loadmat(file, variable_names=("X", "y"))
    except UnpackedSizeError:
        raise
    except OSError as error:
        raise unreadable(path, error) from None
    except Exception as error:  # scipy raises what its parser happens to meet
        reason = " ".join(str(error).split()) or type(error).__name__
        raise damaged(path, f"is not a whole MATLAB file of version 5 ({reason})") from None
    images, labels = arrays.get("X"), arrays.get("y")
    if images is None or labels is None:
        raise damaged(path, "lacks the arrays `X` and `y`")
    if images.dtype != np.uint8 or images.ndim != 4:
        raise damaged(path, f"`X` is {images.dtype} {images.shape} where uint8 (32, 32, 3, N) was expected")
    if labels.dtype.kind not in "iu" or labels.size != images.shape[3]:
        raise damaged(path, f"`y` is {labels.dtype} {labels.shape} where one whole number an image was expected")
    digits = labels.reshape(-1).astype(np.int64)
    return np.ascontiguousarray(np.moveaxis(images, 3, 0)), np.where(digits == 10, 0, digits)


def _unpacked_size(file: IO[bytes]) -> int:
    """Return the bytes of `X` and `y` as the headers of the file say.

    Raises:
        ValueError: one of them is not an array of numbers.
    """
    size = 0
    for name, shape, kind in whosmat(file):
        if name in ("X", "y") and kind not in _BYTES:
            raise ValueError(f"{name} is a {kind}, not an array of numbers")
        if name in ("X", "y"):
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
# The `.npz` holds `delta` as those of CIFAR-10 do, and `race`. The archive names each file
# `AGE_GENDER_RACE_DATE.jpg.chip.jpg`; a few names lack the race and are left out. There is no
# official split: a tenth is held out by a public permutation.

SIDE = 32
_GZIP = b"\x1f\x8b"
_SPLIT_SEED = 0
_NAMED = re.compile(r"(?:.*/)?\d+_[01]_([0-4])_\d+\.jpg(?:\.chip\.jpg)?")


def read_utkface(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """All faces with their race.

    Args:
        path: `subset.npz`, or the archive of JPEG files, in its packed form or unpacked by gzip alone.

    Returns:
        Images uint8 `[N, 32, 32, 3]`, and 0 White, 1 Black, 2 Asian, 3 Indian, 4 others `[N]`.

    Raises:
        DatasetError: the file cannot be read, is damaged, or holds no faces.
        UnpackedSizeError: the file unpacks to more than the limit of `unpack_limit`.
    """
    return _of_arrays(path) if path.suffix == ".npz" else _of_archive(path)


def _of_arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    arrays = read_npz(path, ("delta", "race"))
    if missing := [name for name in ("delta", "race") if name not in arrays]:
        raise damaged(path, f"lacks the arrays {', '.join(missing)}")
    delta, labels = arrays["delta"], arrays["race"]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise damaged(path, f"`race` is {labels.dtype} {labels.shape} where whole numbers, one for each image, were expected")
    if delta.dtype != np.uint8 or delta.shape != (3, len(labels), SIDE, SIDE):
        raise damaged(path, f"`delta` is {delta.dtype} {delta.shape} where uint8 {(3, len(labels), SIDE, SIDE)} was expected")
    return decode_delta(delta), labels


def _of_archive(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """In the order of file names, which is that of every copy of the archive."""
    found, what = [], "is not a whole archive of JPEG files"
    try:
        with path.open("rb") as file, _unpacked(file) as stream:
            archive = tarfile.open(fileobj=io.BufferedReader(BoundedStream(stream, path)), mode="r|")
            for member in archive:
                named = _NAMED.fullmatch(member.name)
                image = archive.extractfile(member) if named and member.isfile() else None
                if named and image is not None:
                    found.append((Path(member.name).name, _reduced(io.BytesIO(image.read())), int(named[1])))
    except OSError as error:
        raise (unreadable(path, error) if error.errno else damaged(path, f"{what} ({error})")) from None
    except (DatasetError, UnpackedSizeError):
        raise
    except Exception as error:  # tarfile, zlib and Pillow raise what they happen to meet
        reason = " ".join(str(error).split()) or type(error).__name__
        raise damaged(path, f"{what} ({reason})") from None
    if not found:
        raise damaged(path, "holds no file of the form AGE_GENDER_RACE_DATE.jpg")
    found.sort(key=lambda one: one[0])
    return np.stack([image for _, image, _ in found]), np.array([race for _, _, race in found], np.int64)


def _unpacked(file: IO[bytes]) -> IO[bytes]:
    """Return the archive as a stream, unpacked where its first bytes are those of gzip."""
    packed = file.read(2) == _GZIP
    file.seek(0)
    return cast("IO[bytes]", gzip.GzipFile(fileobj=file)) if packed else file


def _reduced(file: Any) -> np.ndarray:
    """One JPEG file as uint8 `[32, 32, 3]`, each pixel the mean of those it stands for."""
    try:
        from PIL import Image
    except ImportError:
        raise DatasetError("faces of UTKFace are JPEG files, and Pillow is not installed: pip install 'dpkfc[data]'") from None
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX))


def _utkface_split(paths: list[Path]) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    images, labels = read_utkface(paths[0])
    order = np.random.Generator(np.random.PCG64(_SPLIT_SEED)).permutation(len(labels))
    test, train = order[: len(labels) // 10], order[len(labels) // 10 :]
    return (images[train], labels[train]), (images[test], labels[test])


UTKFACE = Source(name="UTKFace", folder="utkface", files=("UTKFace.tar.gz or subset.npz",), read=_utkface_split, whole=21_335)
