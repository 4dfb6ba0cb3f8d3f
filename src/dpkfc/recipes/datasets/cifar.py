"""CIFAR-10 from a compact `.npz`: planes of colour differences, differenced once along rows and once along columns.

`delta` is uint8 `[3, N, 32, 32]` with wrap-around; summed up along both image axes it gives the planes G, R − G, B − G.
`y` holds the labels. A plain `x` `[N, 32, 32, 3]` of uint8 in place of `delta` is taken as it is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dpkfc.recipes.datasets.errors import damaged
from dpkfc.recipes.datasets.npz import read_npz

__all__ = ["decode_delta", "encode_delta", "read_cifar"]


def decode_delta(delta: np.ndarray) -> np.ndarray:
    """RGB images uint8 `[N, H, W, 3]` of an encoded array uint8 `[3, N, H, W]`, without loss."""
    planes = np.cumsum(delta, axis=2, dtype=np.uint8)
    np.cumsum(planes, axis=3, dtype=np.uint8, out=planes)
    green, red, blue = planes
    return np.stack([red + green, green, blue + green], axis=-1)


def encode_delta(images: np.ndarray) -> np.ndarray:
    """The inverse of `decode_delta`: uint8 `[3, N, H, W]` of RGB images uint8 `[N, H, W, 3]`."""
    red, green, blue = np.moveaxis(images, -1, 0)
    planes = np.stack([green, red - green, blue - green])
    for axis in (2, 3):
        planes = np.diff(planes, axis=axis, prepend=np.zeros_like(planes[:, :, :1] if axis == 2 else planes[..., :1]))
    return planes


def read_cifar(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read one split of CIFAR-10.

    Args:
        path: an `.npz` with `delta` (or `x`) and `y`.

    Returns:
        Images uint8 `[N, 32, 32, 3]` and labels `[N]`, whole numbers.

    Raises:
        DatasetError: the file cannot be read, is no zip file, lacks an array, or an array has another shape or type.
    """
    arrays = read_npz(path, ("delta", "x", "y"))
    if "y" not in arrays or not {"delta", "x"} & set(arrays):
        raise damaged(path, f"holds the arrays {sorted(arrays)} where `delta` and `y` were expected")
    labels = arrays["y"]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise damaged(path, f"`y` is {labels.dtype} {labels.shape} where whole numbers, one for each image, were expected")
    if "delta" in arrays:
        _check(path, "delta", arrays["delta"], (3, len(labels), 32, 32))
        images = decode_delta(arrays["delta"])
    else:
        images = arrays["x"]
    _check(path, "x", images, (len(labels), 32, 32, 3))
    return images, labels


def _check(path: Path, name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    if array.dtype != np.uint8 or array.shape != shape:
        raise damaged(path, f"`{name}` is {array.dtype} {array.shape} where uint8 {shape} was expected")
