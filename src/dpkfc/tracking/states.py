"""The states of tensors in a tracked pass.

A tracked pass gives every tensor one of five states. A public tensor depends on no example and has
no entry. `docs/design.md`, "One gradient, one example", explains the proof that they make up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class BatchAxis:
    """Says that `dim` runs over (pre, N, post), and that its index (p, i, q) is of example i.

    Examples: `[N, d]` has `BatchAxis(0)`, a sequence-first `[T, N, d]` has `BatchAxis(1)`, tokens
    folded as `[N * T, d]` have `BatchAxis(0, post=T)`, two towers joined as `[2 * N, d]` have
    `BatchAxis(0, pre=2)`.
    """

    dim: int
    pre: int = 1
    post: int = 1

    def shift(self, by: int) -> BatchAxis:
        """Return the same axis after `by` dimensions were added in front of it."""
        return BatchAxis(self.dim + by, self.pre, self.post)

    def move(self, dim: int) -> BatchAxis:
        """Return the same axis in another dimension."""
        return BatchAxis(dim, self.pre, self.post)

    @property
    def extra_dims(self) -> int:
        """Return how many dimensions `example_first` adds for pre and post."""
        return (self.pre > 1) + (self.post > 1)

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


PUBLIC = Public()


@dataclass(frozen=True)
class Total:
    """Say that a scalar is Σ_i ℓ_i times a public number, where ℓ_i depends on example i alone.

    Attributes:
        is_mean: the sum was divided by the number of examples.
        number: what the sum was multiplied by besides.
        entries: of each example, over which a mean was taken too.
        is_quotient: it is a mean since the sum was divided by a multiple of N, which may be a
            constant by intention.
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


_OF_LAYER = Unknown("layer", "what a layer computes inside is used outside of it")
OF_EARLIER_BATCH = Unknown("a tensor that an earlier batch left", "it depends on other examples")

State = BatchAxis | Parametric | Public | Total | Unknown
"""What a tracked pass knows of a tensor that is not public."""
PRIVATE = (BatchAxis, Total, Unknown)
# What tensors that a layer computes inside are outside of it; others stay what they are.
OUTSIDE_OF_LAYER: Mapping[type, State] = {
    Public: PARAMETRIC,
    BatchAxis: _OF_LAYER,
    Total: _OF_LAYER,
}


def axis_after_reshape(
    axis: BatchAxis, shape: Sequence[int], new_shape: Sequence[int], size: int
) -> BatchAxis | None:
    """Return the axis after a reshape that keeps the order, or None if it tears the batch.

    Args:
        axis: the axis in the old shape.
        shape: the old shape.
        new_shape: the new shape, with as many elements.
        size: examples N, at least 2.
    """
    trailing = shape[axis.dim + 1 :]
    inner = axis.post * math.prod(trailing)
    if math.prod(new_shape) == 0:
        return None
    right = 1
    for dim, length in reversed([*enumerate(new_shape)]):
        post, rest = divmod(inner, right)
        if rest == 0:
            pre, other_rest = divmod(length, size * post)
            if other_rest == 0:
                return BatchAxis(dim, pre, post)
        right *= length
    return None


def example_first(x: Tensor, axis: BatchAxis, size: int) -> Tensor:
    """Return `[N, ...]`: examples in front; pre and post are dimensions if longer than 1.

    Args:
        x: a tensor with this axis.
        axis: where its examples lie.
        size: examples N.
    """
    if axis.pre == axis.post == 1:
        # A check of padding asks where the size is another.
        return x.movedim(axis.dim, 0) if axis.dim else x
    rows = _split_batch(x, axis, size)
    pre_dim = axis.dim + 1
    if axis.post == 1:
        rows = rows.squeeze(pre_dim + 1)
    if axis.pre == 1:
        rows = rows.squeeze(pre_dim)
    return rows


def one_example_a_row(x: Tensor, axis: BatchAxis, size: int) -> Tensor:
    """Return `[N, ...]`, where each row is what a batch of that one example would hold.

    The batch dimension is kept.
    """
    rows = _split_batch(x, axis, size)
    pre_dim = axis.dim + 1
    return rows.flatten(pre_dim, pre_dim + 1)


def _split_batch(x: Tensor, axis: BatchAxis, size: int) -> Tensor:
    """Return `[N, ...]` with pre and post in the place of the batch dimension."""
    shape = (axis.pre, size, axis.post)
    parts = x.unflatten(axis.dim, shape)
    return parts.movedim(axis.dim + 1, 0)


def names_of_shapes(tensors: Sequence[Tensor]) -> str:
    """Return the shapes of some tensors as they appear in messages."""
    shapes = [list(x.shape) for x in tensors[:3]]
    return " and ".join(map(str, shapes))
