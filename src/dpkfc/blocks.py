"""Normal forms: what one layer contributes to the per-example gradients of a batch.

Every covered layer is reduced to one of four values, so that norms, clipped sums and curvature factors are written
once (a convolution to a fifth for whoever looks at curvature: the first, before its patches are formed). With inputs
`a_t` and output gradients `b_t` at position t the gradient of example n is `g_n = Σ_t b_nt a_ntᵀ`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Block", "Formed", "Lookup", "Outer", "Patched", "PerExample", "Tied", "formed"]


@dataclass(frozen=True)
class Outer:
    """A matrix-shaped gradient as a sum of outer products over positions.

    Attributes:
        a: inputs `[N * groups, T, d_in]`; the last column is the homogeneous 1 when a bias is trained.
        b: gradients of the per-example loss with respect to the outputs, `[N * groups, T, d_out]`.
        groups: groups of a grouped convolution; the leading axis runs over examples, then groups (groups fastest).
        homogeneous: the column of ones is implied and `a` lacks it (saves a copy); `explicit()` appends it.
    """

    a: Tensor
    b: Tensor
    groups: int = 1
    homogeneous: bool = False

    def explicit(self) -> Outer:
        """The same block with the column of ones written out."""
        if not self.homogeneous:
            return self
        ones = self.a.new_ones(*self.a.shape[:2], 1)
        return Outer(torch.cat([self.a, ones], -1), self.b, self.groups)

    @property
    def d_in(self) -> int:
        """Input features, the homogeneous coordinate included."""
        return self.a.shape[2] + self.homogeneous

    @property
    def batch_size(self) -> int:
        """Number of examples N."""
        return self.a.shape[0] // self.groups

    def per_example(self) -> Tensor:
        """Materialised gradients `[N * groups, d_out, d_in]`."""
        return torch.bmm(self.b.transpose(1, 2), self.explicit().a)


_MOST = 4  # where one patch in so many is wanted, or more, forming all of them is faster


@dataclass(frozen=True)
class Patched:
    """An `Outer` whose inputs are patches of a convolution, none of which is formed before it is asked for.

    Attributes:
        view: the patches as a strided view of the padded input, `[N, views, groups, c_in / groups, *kernel, *positions]`.
        b: as of `Outer`, `[N * groups, T, d_out]`; the T positions are those of the views one after the other.
        homogeneous: the bias is trained, so that every row ends in 1.
    """

    view: Tensor
    b: Tensor
    homogeneous: bool = False

    @property
    def groups(self) -> int:
        """Groups of the convolution."""
        return self.view.shape[2]

    @property
    def batch_size(self) -> int:
        """Number of examples N."""
        return self.view.shape[0]

    @property
    def d_in(self) -> int:
        """Input features, the homogeneous coordinate included."""
        return math.prod(self.view.shape[3 : 4 + self._axes]) + self.homogeneous

    @property
    def _axes(self) -> int:
        """Spatial axes of the convolution."""
        return (self.view.dim() - 4) // 2

    def rows(self, index: Tensor) -> Tensor:
        """Rows of a `[N * groups, T, d]`, flattened over its first two axes, without the column of ones: `[m, d]`."""
        if _MOST * len(index) > self.b.shape[0] * self.b.shape[1]:
            a = replace(self, homogeneous=False).explicit().a
            return a[index // a.shape[1], index % a.shape[1]]  # by two indices, as `flatten` copies what is transposed
        axes, place = self._axes, []
        for size in reversed(self.view.shape[4 + self._axes :]):  # of the row-major number, the last axis first
            place.append(index % size)
            index = index // size
        views, groups = self.view.shape[1:3]
        view, index = index % views, index // views
        patch = range(3, 4 + axes)
        ordered = self.view.permute(0, 1, 2, *range(4 + axes, 4 + 2 * axes), *patch)
        return ordered[(index // groups, view, index % groups, *reversed(place))].flatten(1)

    def examples(self, chosen: slice) -> Patched:
        """The block of some of the examples."""
        of_groups = slice(chosen.start * self.groups, chosen.stop * self.groups)
        return replace(self, view=self.view[chosen], b=self.b[of_groups])

    def explicit(self) -> Outer:
        """The same block with all patches formed."""
        width = self.d_in - self.homogeneous
        columns = self.view.permute(0, 2, 1, *range(3, self.view.dim()))
        columns = columns.reshape(self.b.shape[0], self.view.shape[1], width, -1)  # faster than rows at once
        return Outer(columns.transpose(2, 3).reshape(*self.b.shape[:2], -1), self.b, self.groups, self.homogeneous).explicit()

    def per_example(self) -> Tensor:
        """Materialised gradients `[N * groups, d_out, d_in]`."""
        return self.explicit().per_example()


@dataclass(frozen=True)
class Lookup:
    """The gradient of an embedding table: `a` is a one-hot row that is never formed.

    Attributes:
        ids: integer row numbers `[N, T]`.
        b: output gradients `[N, T, d_out]`; zero where `ids` is the padding index.
        num_rows: rows of the table.
    """

    ids: Tensor
    b: Tensor
    num_rows: int

    @property
    def batch_size(self) -> int:
        """Number of examples N."""
        return self.ids.shape[0]

    def per_example(self) -> Tensor:
        """Materialised gradients `[N, num_rows, d_out]` (the table's own orientation)."""
        n, _, d = self.b.shape
        out = self.b.new_zeros(n, self.num_rows, d)
        return out.scatter_add_(1, self.ids.unsqueeze(-1).expand_as(self.b), self.b)


@dataclass(frozen=True)
class PerExample:
    """Materialised per-example gradients of small or irregular parameters.

    Attributes:
        grads: role of the parameter in its module (for example `weight`) to `[N, *parameter.shape]`.
    """

    grads: dict[str, Tensor]

    @property
    def batch_size(self) -> int:
        """Number of examples N."""
        return next(iter(self.grads.values())).shape[0]


@dataclass(frozen=True)
class Tied:
    """The gradient `[V, d]` of one weight that is an embedding table and the weight of a linear layer.

    Attributes:
        lookup: its uses as a table, `b` being the gradients at the embedding's output `[N, S, d]`; S may be 0.
        outer: its uses as a linear layer, a `[N, T, d]` and b `[N, T, V]`; T may be 0.
    """

    lookup: Lookup
    outer: Outer

    @property
    def batch_size(self) -> int:
        """Number of examples N."""
        return self.outer.batch_size

    def per_example(self) -> Tensor:
        """Materialised gradients of the sum of uses `[N, V, d]`."""
        ids = self.lookup.ids.unsqueeze(-1).expand_as(self.lookup.b)
        return self.outer.per_example().scatter_add_(1, ids, self.lookup.b)


@dataclass(frozen=True)
class Formed:
    """Materialised gradients of a matrix-shaped layer.

    Attributes:
        gradients: `[N * groups, d_out, d_in]`, the bias as last column; an embedding's are `[N, num_rows, d_out]`.
        groups: groups of a grouped convolution.
        crosswise: the matrix lies as an embedding's table does, so that a metric maps its transpose.
    """

    gradients: Tensor
    groups: int = 1
    crosswise: bool = False

    @property
    def batch_size(self) -> int:
        """Number of examples N."""
        return self.gradients.shape[0] // self.groups

    def per_example(self) -> Tensor:
        """Return the gradients as they are."""
        return self.gradients


Block = Outer | Patched | Lookup | PerExample | Tied


def formed(block: Block) -> Block:
    """A block as it is, with the patches of a convolution written out."""
    return block.explicit() if isinstance(block, Patched) else block
