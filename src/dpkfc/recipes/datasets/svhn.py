"""SVHN, house numbers cropped to single digits (Netzer et al. 2011): MATLAB files with `X` `[32, 32, 3, N]` and `y` `[N, 1]`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import IO

import numpy as np
from scipy.io import loadmat, whosmat

from dpkfc.recipes.datasets.errors import damaged, unreadable
from dpkfc.recipes.datasets.sources import Source
from dpkfc.unpack_limit import UnpackedSizeError, check_unpacked_size

__all__ = ["SVHN", "read_svhn"]

_BYTES = {
    "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8, "single": 4, "double": 8,
}  # fmt: skip


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
