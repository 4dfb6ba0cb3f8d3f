"""SVHN, house numbers cropped to single digits (Netzer et al. 2011): MATLAB files with `X` `[32, 32, 3, N]` and `y` `[N, 1]`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.io import loadmat

from dpkfc.recipes.datasets.errors import damaged, unreadable
from dpkfc.recipes.datasets.sources import Source

__all__ = ["SVHN", "read_svhn"]


def read_svhn(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read one split.

    Returns:
        Images uint8 `[N, 32, 32, 3]` and digits `[N]`; the files say 10 for a zero.

    Raises:
        DatasetError: the file cannot be read, is no MATLAB file, lacks an array, or an array has another shape or type.
    """
    try:
        with path.open("rb") as file:
            arrays = loadmat(file, variable_names=("X", "y"))
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


SVHN = Source(
    name="SVHN",
    folder="svhn",
    files=("train_32x32.mat", "test_32x32.mat"),
    read=lambda paths: (read_svhn(paths[0]), read_svhn(paths[1])),
    hub="ufldl-stanford/svhn",
    hub_config="cropped_digits",
    whole=73_257,
)
