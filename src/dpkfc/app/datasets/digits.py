"""The 8×8 digits that scikit-learn carries: real data without a download."""

from __future__ import annotations

import numpy as np

from dpkfc.app.datasets.errors import import_optional
from dpkfc.app.datasets.pixels import Pixels, hold_out

TEST_SIZE = 360


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
