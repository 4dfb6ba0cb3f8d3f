"""Products of many rows with a thin matrix, or with the transpose of one.

MKL takes twice as long for them on a processor of AMD as oneDNN, which torch asks for a
convolution of one pixel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dpkfc.linalg.deferred_flags import is_on_accelerator

_IMAGES = 16  # with fewer, torch takes MKL for the convolution too
_LEAST = 128  # rows


def multiply(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return the product `[n, k]` of rows `[n, d]` and a matrix `[d, k]`."""
    whole = len(rows) // _IMAGES * _IMAGES
    is_plain = rows.dtype == torch.float32 and rows.is_contiguous() and not is_on_accelerator(rows)
    if whole < _LEAST or not is_plain or not torch.backends.mkldnn.is_available():
        return rows @ matrix
    images = rows[:whole].view(_IMAGES, 1, -1, rows.shape[1])
    filters = matrix.T[:, :, None, None]
    product = F.conv2d(images.permute(0, 3, 1, 2), filters)
    product = product.permute(0, 2, 3, 1).reshape(whole, matrix.shape[1])
    if whole < len(rows):
        product = torch.cat([product, rows[whole:] @ matrix])
    return product
