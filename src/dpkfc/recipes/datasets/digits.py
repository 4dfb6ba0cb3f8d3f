"""The 8×8 digits that scikit-learn carries: real data without a download."""

from __future__ import annotations

import numpy as np

from dpkfc.recipes.datasets.errors import DatasetError
from dpkfc.recipes.datasets.images import Pixels

__all__ = ["TEST_SIZE", "read_digits"]

TEST_SIZE = 360
_SPLIT_SEED = 0


def read_digits() -> Pixels:
    """Training and test images of the digits, split by a fixed public permutation.

    Returns:
        1,437 training and 360 test images, uint8 0–16, `[N, 8, 8, 1]`.

    Raises:
        DatasetError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DatasetError("the digits come with scikit-learn: pip install scikit-learn") from None
    stored = load_digits()
    images, labels = stored.images.astype(np.uint8)[..., None], stored.target.astype(np.int64)
    order = np.random.Generator(np.random.PCG64(_SPLIT_SEED)).permutation(len(labels))
    test, train = order[:TEST_SIZE], order[TEST_SIZE:]
    return Pixels((images[train], labels[train]), (images[test], labels[test]), source="scikit-learn load_digits()")
