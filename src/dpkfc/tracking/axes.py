"""Where the examples of a batch lie inside a tensor, and how views and products move that place.

A tracked pass gives every tensor one of five states. A public tensor depends on no example and has no entry. The others
are values of this module. `docs/design.md`, "One gradient, one example", explains the proof that they make up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = [
    "PARAMETRIC",
    "PUBLIC",
    "BatchAxis",
    "Parametric",
    "Public",
    "State",
    "Total",
    "Unknown",
    "axis_after_reshape",
    "example_first",
]


@dataclass(frozen=True)
class BatchAxis:
    """Say that dimension `dim` runs over (pre, N, post), and that index (p, i, q) of it belongs to example i.

    Examples: `[N, d]` has `BatchAxis(0)`, a sequence-first `[T, N, d]` has `BatchAxis(1)`, tokens folded as `[N * T, d]` have
    `BatchAxis(0, post=T)`, two towers joined as `[2 * N, d]` have `BatchAxis(0, pre=2)`.
    """

    dim: int
    pre: int = 1
    post: int = 1

    def shifted(self, by: int) -> BatchAxis:
        """Return the same axis after `by` dimensions were added in front of it."""
        return BatchAxis(self.dim + by, self.pre, self.post)

    def length(self, size: int) -> int:
        """Return the length of the dimension for a batch of `size` examples."""
        return self.pre * size * self.post


class Parametric:
    """Say that a tensor depends on trainable parameters and on no example."""

    def __repr__(self) -> str:
        return "parametric"


PARAMETRIC = Parametric()


class Public:
    """Say that a tensor with a history of its own was computed from public tensors alone."""

    def __repr__(self) -> str:
        return "public"


PUBLIC = Public()


@dataclass(frozen=True)
class Total:
    """Say that a scalar is Σ_i ℓ_i times a public number, where ℓ_i depends on example i alone.

    Attributes:
        is_mean: the sum was divided by the number of examples.
        number: what the sum was multiplied by besides.
        entries: of each example, over which a mean was taken too.
        is_quotient: it is a mean since the sum was divided by a multiple of N, which may be a constant by intention.
    """

    is_mean: bool = False
    number: float = 1.0
    entries: float = 1.0
    is_quotient: bool = False

    @property
    def factor(self) -> float:
        """Return what an entry of an example counts, but for the number of examples."""
        return self.number / self.entries


@dataclass(frozen=True)
class Unknown:
    """Say that the examples of a tensor cannot be told from its shape any more.

    Attributes:
        operation: name of the first operation that lost the axis, such as "aten.sort.default".
        reason: what happened, with the shapes of its operands.
    """

    operation: str
    reason: str


State = BatchAxis | Parametric | Public | Total | Unknown
"""What a tracked pass knows of a tensor that is not public."""


def axis_after_reshape(axis: BatchAxis, shape: Sequence[int], new_shape: Sequence[int], size: int) -> BatchAxis | None:
    """Return the axis after a reshape that keeps the order of the elements, or None where the batch is torn apart.

    Args:
        axis: the axis in the old shape.
        shape: the old shape.
        new_shape: the new shape, with as many elements.
        size: examples N, at least 2.
    """
    inner = axis.post * math.prod(shape[axis.dim + 1 :])
    if inner == 0 or math.prod(new_shape) == 0:
        return None
    right = 1
    for dim in reversed(range(len(new_shape))):
        length = new_shape[dim]
        post, rest = divmod(inner, right)
        if rest == 0 and post > 0 and length % (size * post) == 0:
            return BatchAxis(dim, length // (size * post), post)
        right *= length
        if right > inner:
            return None
    return None


def example_first(x: Tensor, axis: BatchAxis, size: int) -> Tensor:
    """Return `[N, ...]`: the examples in front, and pre and post as dimensions where they are longer than 1.

    Args:
        x: a tensor with this axis.
        axis: where its examples lie.
        size: examples N.
    """
    if axis.pre == 1 and axis.post == 1:
        return x if axis.dim == 0 else x.movedim(axis.dim, 0)
    x = x.unflatten(axis.dim, (axis.pre, size, axis.post)).movedim(axis.dim + 1, 0)
    if axis.post == 1:
        x = x.squeeze(axis.dim + 2)
    return x.squeeze(axis.dim + 1) if axis.pre == 1 else x


def names_of_shapes(tensors: Sequence[Tensor]) -> str:
    """Return the shapes of some tensors as they appear in messages."""
    return " and ".join(str(list(x.shape)) for x in tensors[:3])
