"""Name the ways to clip, and bound what one example contributes after each of them."""

from __future__ import annotations

import math

from dpkfc._checks import check_one_of, check_positive

CLIPPINGS = ("flat", "normalised", "automatic", "per_layer")
SPLIT = ("embedding", "embedding_residual")


def contribution_bound(clipping: str, max_grad_norm: float) -> float:
    """Return the largest norm that one example may contribute to the sum after clipping.

    Args:
        clipping: flat, normalised, automatic, per_layer, embedding or embedding_residual.
        max_grad_norm: C.

    Returns:
        C for flat, automatic and per-layer clipping (C / √L for each of L layers), 1 for normalised
        clipping (De et al. 2022: clipped, then divided by C). Each part of a split gradient is
        divided by its own norm: 1 for the embedding alone, √2 for embedding and residual.

    Raises:
        ValueError: an unknown clipping, a C that is not positive and finite, or a C for a split
            gradient.
    """
    check_one_of("clipping", clipping, CLIPPINGS + SPLIT)
    check_positive("max_grad_norm", max_grad_norm)
    if clipping in SPLIT and max_grad_norm != 1:
        raise ValueError(
            f"max_grad_norm={max_grad_norm} has no meaning with clipping='{clipping}', whose norms "
            "the preconditioner holds; leave max_grad_norm at 1"
        )
    fixed = {"normalised": 1.0, "embedding": 1.0, "embedding_residual": math.sqrt(2)}
    return fixed.get(clipping, max_grad_norm)
