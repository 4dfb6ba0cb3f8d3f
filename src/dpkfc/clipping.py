"""Name the ways to clip, and bound what one example contributes after each of them."""

from __future__ import annotations

import math

from dpkfc._checks import check_one_of, check_positive

CLIPPINGS = ("flat", "normalised", "automatic", "per_layer")
SPLIT = ("embedding", "embedding_residual")


def contribution_bound(clipping: str, max_grad_norm: float) -> float:
    """Return the largest norm that one example may contribute to the sum after clipping.

    An example with gradient g adds:

    | clipping | contribution | its norm is at most |
    |---|---|---|
    | flat | g · min(1, C / ‖g‖) | C |
    | automatic | g · C / (‖g‖ + γ) | C |
    | per_layer | for each of L layers, g_l · min(1, C / (√L ‖g_l‖)) | C |
    | normalised | g · min(1 / C, 1 / ‖g‖) | 1 |
    | embedding | w · min(1 / S₁, 1 / ‖w‖), w the part of g in the basis | 1 |
    | embedding_residual | the same, and r · min(1 / S₂, 1 / ‖r‖) of the rest r | √2 |

    Args:
        clipping: one of these.
        max_grad_norm: C.

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
