"""CIFAR-10 from a compact `.npz`.

It holds planes of colour differences, differenced once along rows and once along columns. `delta`
is uint8 `[3, N, 32, 32]` with wrap-around; summed up along both image axes it gives the planes G,
R − G, B − G. `y` holds the labels. A plain `x` `[N, 32, 32, 3]` of uint8 in place of `delta` is
taken as it is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dpkfc.app.datasets.errors import damaged_error
from dpkfc.app.datasets.examples import Split
from dpkfc.app.datasets.npz import read_npz
from dpkfc.app.datasets.pixels import check_labels, check_pixels


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
