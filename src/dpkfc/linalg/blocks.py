"""Normal forms of what one layer contributes to the per-example gradients of a batch.

With inputs `a_t` and output gradients `b_t` at position t the gradient of example n is
`g_n = Σ_t b_nt a_ntᵀ`. Every covered layer is reduced to one of a few blocks. A block can select
examples, merge rows, sum with weights and materialise its gradients. `norms` bounds what rounding
loses.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from dpkfc.linalg.metric import Eigenbasis, Shape
from dpkfc.linalg.subspace import Span
from dpkfc.tensors import Tensors

# --------------------------------------------------------------------------------------------------
# Rows and chunks.

RowIndex = slice | Tensor
"""Examples of a block: from start to stop, or where a mask `[N]` is true."""
_CHUNK_ELEMENTS = 1 << 24
_CURVATURE_ELEMENTS = 1 << 22  # in float64, next to a probe


def chunks(count: int, elements_each: int, most: int | None = None) -> Iterator[slice]:
    """Yield slices that cover 0 … count, of at most so many elements each, or one entry."""
    most = most or _CHUNK_ELEMENTS
    size = max(1, most // max(1, elements_each))
    for start in range(0, count, size):
        yield slice(start, start + size)


def pick_rows(x: Tensor, index: Tensor | None) -> Tensor:
    """Return rows `[m, d]` of x `[n, T, d]`, flattened over its first axes; None for all."""
    if index is None:
        return x.flatten(0, 1)
    # Two indices: `flatten` would copy a transposed tensor.
    positions = x.shape[1]
    return x[index // positions, index % positions]


def sum_squares(x: Tensor) -> Tensor:
    """Return Σ x² over the last axis without overflow or underflow in float32."""
    return x.double().square().sum(-1)


def roundoff(x: Tensor) -> float:
    """Return the unit roundoff of the type of a tensor."""
    return torch.finfo(x.dtype).eps / 2


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the type of norms, sums and releases: float64 for a float64 tensor, else float32."""
    return torch.promote_types(x.dtype, torch.float32)


def raise_precision(x: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 as it is.

    Gradients, norms, sums and noise live in these types whatever the model computes in.
    """
    return x.to(accumulation_dtype(x))


def _repeat(rows: RowIndex, each: int) -> RowIndex:
    """Return which entries of an axis that holds `each` entries for every example are meant."""
    if isinstance(rows, slice):
        return slice(rows.start * each, rows.stop * each)
    return rows.repeat_interleave(each)


def _mask(x: Tensor, excluded: Tensor | None, each: int = 1) -> Tensor:
    """Return x with the rows of excluded examples set to zero, `each` rows an example."""
    if excluded is None:
        return x
    rows = excluded.repeat_interleave(each)
    is_excluded = _align(rows, x)
    return x.masked_fill(is_excluded, 0)


def _weigh(x: Tensor, weights: Tensor, excluded: Tensor | None, each: int = 1) -> Tensor:
    """Return x times the weights of its examples, `each` rows an example, and 0 for excluded."""
    weights = weights.to(x.dtype).repeat_interleave(each)
    x = _mask(x, excluded, each)
    return x * _align(weights, x)


def _align(values: Tensor, x: Tensor) -> Tensor:
    """Return one value a row of x `[n, ...]` in a shape that broadcasts over x."""
    ones = [1] * (x.dim() - 1)
    return values.view(-1, *ones)


def sum_groups(x: Tensor, groups: int) -> Tensor:
    """Return `[N]` from `[N * groups]`."""
    return x.view(-1, groups).sum(1)


# --------------------------------------------------------------------------------------------------
# Blocks. All of them share these methods:
#
#   select(rows)            the block of the examples start … stop, or of a mask
#   merge_rows(count, size) the block of `count` examples, each the sum of `size` consecutive rows
#   weighted_sum(w, bad)    Σ_n w_n g_n. The rows of examples in the mask `bad`, whose gradients are
#                           not finite, are zeroed first, since 0 · NaN is NaN.
#   sum_by_row(w, bad)      the same as a sparse tensor of the rows that are not zero
#   join(others)            several uses of one layer as one block: the gradient is their sum
#   iterate_flat()          role to materialised gradients [n, numel], some examples at a time
#   inner_products(span)    ⟨L_j, g_n⟩ over one layer, [N, k] in float64
#
# Those that curvature reads have these too:
#
#   side_shapes             side, or role of an elementwise layer, to its shape
#   iterate_explicit()      the block, of a convolution its patches, some examples at a time
#   sum_gradients()         Σ_n g_n in float64
#   sum_squares()           Σ_n g_n², entry by entry, in float64


_Form = TypeVar("_Form", bound="_Block")
_Result = TypeVar("_Result")


class _Block:
    """What most blocks share.

    Attributes:
        kind: kind of the factors of the layer, None if unknown.
        dimensions: positions T, input features and output features of a matrix-shaped layer whose
            norm method is chosen, None for others.
        settings: of a convolution, None for others.
    """

    kind: ClassVar[str | None] = None
    dimensions: Any = None
    settings: Any = None

    def _map_tensors(self: _Form, function: Callable[[Tensor], Tensor]) -> _Form:
        """Return the block with the values of a function in place of its tensors."""
        block: Any = self
        parts: dict[str, Any] = {}
        for field in fields(block):
            x = getattr(block, field.name)
            if isinstance(x, Tensor):
                parts[field.name] = function(x)
            elif isinstance(x, _Block):
                parts[field.name] = x._map_tensors(function)
        mapped: _Form = replace(block, **parts)
        return mapped

    def select(self: _Form, rows: RowIndex) -> _Form:
        """Return the block of the examples start … stop, or of a mask."""
        size = max(1, self.batch_size)
        return self._map_tensors(lambda x: x[_repeat(rows, len(x) // size)])

    def merge_rows(self: Any, count: int, size: int) -> Any:
        """Return the block of `count` examples, each the sum of `size` consecutive rows."""
        return self._map_tensors(lambda x: _merge_positions(x, count, size, self.groups))

    def double(self: _Form) -> _Form:
        """Return the block in float64."""
        return self._map_tensors(lambda x: x.double() if x.is_floating_point() else x)

    def sum_by_row(self: Any, weights: Tensor, excluded: Tensor | None = None) -> Tensor:
        """Return `weighted_sum` as a sparse tensor of its rows that are not zero."""
        total: Tensor = self.weighted_sum(weights, excluded)
        return total.to_sparse(1)

    def explicit(self) -> Any:
        """Return the same block with everything written out that its form implies."""
        return self

    def make_factor_block(self) -> Any:
        """Return the block as factors are computed from it."""
        return self.explicit()

    @property
    def like(self: Any) -> Tensor:
        """Return a tensor with the type and the device of the gradients."""
        gradients: Tensor = self.b
        return gradients

    @property
    def batch_size(self: Any) -> int:
        """Return the number of examples N."""
        return len(self.like) // self.groups

    @property
    def d_out(self) -> int:
        """Return the output features."""
        return self.like.shape[-1]

    @property
    def side_shapes(self: Any) -> dict[str, Shape]:
        """Return side, or role of an elementwise layer, to its shape."""
        return {"input": (self.d_in,), "output": (self.d_out,)}

    @property
    def num_entries(self: Any) -> int:
        """Return the entries of one example's gradient."""
        entries: int = self.groups * self.d_out * self.d_in
        return entries

    @property
    def gradient_shapes(self: Any) -> dict[str, Shape]:
        """Return role to the shape of one example's gradient, "" for a matrix `[rows, columns]`."""
        return {"": (self.groups * self.d_out, self.d_in)}

    def flatten(self: Any) -> Tensor:
        """Return gradients `[N, numel]`, the roles of `gradient_shapes` side by side."""
        gradients: Tensor = self.per_example()
        return gradients.reshape(self.batch_size, -1)

    def iterate_explicit(self) -> Iterator[Any]:
        """Yield the block, of a convolution with its patches, of some examples at a time."""
        yield self

    def map_examples(
        self: Any,
        function: Callable[[Any], Tensor],
        elements_each: int,
        shape: Shape = (),
    ) -> Tensor:
        """Return numbers `[N, *shape]` in float64, each of its own example.

        Some examples are processed at a time.

        Args:
            function: from a block to its numbers.
            elements_each: what `function` holds for one example.
            shape: of the numbers of one example.
        """
        pieces = [self.like.new_zeros(0, *shape, dtype=torch.float64)]
        for rows in chunks(self.batch_size, elements_each):
            part = self.select(rows)
            pieces.append(function(part))
        return torch.cat(pieces)

    def iterate_flat(self: Any) -> Iterator[Tensors]:
        """Yield role to materialised gradients `[n, numel]`, of some examples at a time.

        The role is "" for the matrix of weight and bias.
        """
        size = self.num_entries
        for rows in chunks(self.batch_size, size):
            gradients = self.select(rows).per_example()
            yield {"": gradients.reshape(-1, size)}

    def inner_products(self: Any, span: Span) -> Tensor:
        """Return ⟨L_j, g_n⟩ `[N, k]` in float64."""
        pieces = [self.like.new_zeros(0, span.rank, dtype=torch.float64)]
        for part in self.iterate_flat():
            products = []
            for role, g in part.items():
                directions = span.vectors[role].to(g.dtype)
                directions = directions.reshape(span.rank, -1)
                product = g @ directions.T
                products.append(product.double())
            pieces.append(torch.stack(products).sum(0))
        return torch.cat(pieces)


@dataclass(frozen=True)
class Outer(_Block):
    """A matrix-shaped gradient as a sum of outer products over positions.

    Attributes:
        a: inputs `[N * groups, T, d_in]`. The last column is the homogeneous 1 when a bias trains.
        b: gradients of the per-example loss at the outputs, `[N * groups, T, d_out]`.
        groups: groups of a grouped convolution. The leading axis runs over examples, then groups
            (groups fastest).
        homogeneous: the column of ones is implied and `a` lacks it, which saves a copy.
    """

    a: Tensor
    b: Tensor
    groups: int = 1
    homogeneous: bool = False
    kind: ClassVar[str] = "outer"

    @classmethod
    def build(cls, x: Tensor | None, b: Tensor, size: int, *, homogeneous: bool) -> Outer:
        """Build the block of features `[size, ..., d_in]`, None where only a bias trains."""
        b = b.reshape(size, -1, b.shape[-1])
        if x is None:
            # The input is the homogeneous coordinate alone.
            return cls(torch.ones_like(b[..., :1]), b)
        x = x.reshape(size, -1, x.shape[-1])
        return cls(x.to(b.dtype), b, homogeneous=homogeneous)

    @property
    def d_in(self) -> int:
        """Return the input features, the homogeneous coordinate included."""
        return self.a.shape[2] + self.homogeneous

    @property
    def dimensions(self) -> tuple[int, int, int]:
        """Return positions T, input features d_in and output features d_out."""
        return self.a.shape[1], self.d_in, self.d_out

    def outer(self) -> Outer:
        """Return the block itself."""
        return self

    def input_rows(self, index: Tensor | None) -> Tensor:
        """Return rows `[m, d_in]` of the inputs flattened over their first axes, None for all."""
        return pick_rows(self.explicit().a, index)

    def explicit(self) -> Outer:
        """Return the same block with the column of ones written out."""
        if not self.homogeneous:
            return self
        a = _append_ones(self.a)
        return Outer(a, self.b, self.groups)

    def per_example(self) -> Tensor:
        """Return materialised gradients `[N * groups, d_out, d_in]`."""
        inputs = self.explicit().a
        return torch.bmm(self.b.mT, inputs)

    def join(self, others: Sequence[Any]) -> Outer:
        """Return several uses of one layer as one block, with their positions concatenated."""
        uses = [self, *(other.outer() for other in others)]
        a = torch.cat([use.a for use in uses], 1)
        b = torch.cat([use.b for use in uses], 1)
        return replace(self, a=a, b=b)

    def weighted_sum(self, weights: Tensor, excluded: Tensor | None = None) -> Tensor:
        """Return Σ_n weights_n g_n as `[groups * d_out, d_in]`."""
        if self.a.shape[2] < self.d_out and not self.homogeneous:
            # The weighed side is a copy, which the outputs of a language model need not have.
            a = _weigh(self.a, weights, excluded, self.groups)
            b = _mask(self.b, excluded, self.groups)
        else:
            a = _mask(self.a, excluded, self.groups)
            b = _weigh(self.b, weights, excluded, self.groups)
        if self.groups > 1:
            by_group = (len(weights), self.groups)
            a = a.unflatten(0, by_group)
            b = b.unflatten(0, by_group)
            total = torch.einsum("ngto,ngti->goi", b, a)
            return total.flatten(0, 1)
        rows = b.detach().flatten(0, 1)
        inputs = a.detach().flatten(0, 1)
        if not self.homogeneous:
            return rows.T @ inputs
        # Large sums are written once, into the place that they share with the bias.
        total = rows.new_empty(rows.shape[1], inputs.shape[1] + 1)
        torch.mm(rows.T, inputs, out=total[:, :-1])
        torch.sum(rows, 0, out=total[:, -1])
        return total

    def inner_products(self, span: Span) -> Tensor:
        """Return ⟨L_j, g_n⟩ `[N, k]` in float64, for one position as bᵀ L_j a."""
        if self.groups != 1 or self.a.shape[1] != 1:
            return super().inner_products(span)
        k, d_out, _ = span.vectors[""].shape
        directions = span.vectors[""].to(self.a.dtype)
        directions = directions.flatten(0, 1)

        def multiply(part: Outer) -> Tensor:
            a = part.explicit().a[:, 0]
            b = part.b[:, 0].unsqueeze(2)
            mapped = a @ directions.T
            mapped = mapped.view(-1, k, d_out)
            products = torch.bmm(mapped, b)
            return products.squeeze(2).double()

        return self.map_examples(multiply, k * d_out, shape=(k,))

    def _rows_by_group(self) -> tuple[Tensor, Tensor]:
        """Return a and b as float64 `[groups, N, T, d]`."""
        by_group = (-1, self.groups)
        a = self.a.double().unflatten(0, by_group)
        b = self.b.double().unflatten(0, by_group)
        return a.transpose(0, 1), b.transpose(0, 1)

    def sum_gradients(self) -> Tensor:
        """Return Σ_n g_n `[groups, d_out, d_in]` in float64."""
        a, b = self._rows_by_group()
        rows = b.flatten(1, 2)
        return rows.mT @ a.flatten(1, 2)

    def sum_squares(self) -> Tensor:
        """Return Σ_n g_n², entry by entry, `[groups, d_out, d_in]` in float64."""
        a, b = self._rows_by_group()
        if a.shape[2] == 1:
            # With one position the square of a product is the product of squares.
            a = a.squeeze(2).square()
            b = b.squeeze(2).square()
            return b.mT @ a
        total = b.new_zeros(self.groups, self.d_out, a.shape[-1])
        for rows in _summed_chunks(self.batch_size, total.numel()):
            gradients = b[:, rows].mT @ a[:, rows]
            total += gradients.square().sum(1)
        return total


@dataclass(frozen=True)
class Patched(_Block):
    """An `Outer` whose inputs are patches of a convolution, formed only when they are read.

    Attributes:
        view: the patches as a strided view of the padded input,
            `[N, views, groups, c_in / groups, *kernel, *positions]`.
        b: as of `Outer`, `[N * groups, T, d_out]`. The T positions belong to the views in order.
        homogeneous: the bias is trained, so that every row ends in 1.
    """

    view: Tensor
    b: Tensor
    homogeneous: bool = False
    kind: ClassVar[str] = "outer"

    @property
    def groups(self) -> int:
        """Return the groups of the convolution."""
        return self.view.shape[2]

    @property
    def d_in(self) -> int:
        """Return the input features, the homogeneous coordinate included."""
        patch = self.view.shape[3 : self._first_position]
        return math.prod(patch) + self.homogeneous

    @property
    def _first_position(self) -> int:
        """Return the first axis of the view that runs over positions, and not over a patch."""
        return self.view.dim() // 2 + 2

    def input_rows(self, index: Tensor | None) -> Tensor:
        """Return rows `[m, d_in]` of the inputs flattened over their first axes, None for all."""
        rows, positions, _ = self.b.shape
        count = rows * positions
        if index is None or _DENSE_FRACTION * len(index) > count:
            return self.explicit().input_rows(index)
        position_axes = range(self._first_position, self.view.dim())
        row_axes = (0, 2, 1, *position_axes)
        patch_axes = range(3, self._first_position)
        ordered = self.view.permute(*row_axes, *patch_axes)
        row_shape = ordered.shape[: len(row_axes)]
        place = torch.unravel_index(index, row_shape)
        patches = ordered[place].flatten(1)
        if self.homogeneous:
            patches = _append_ones(patches)
        return patches

    def iterate_explicit(self) -> Iterator[Outer]:
        """Yield the block with its patches, of some examples at a time."""
        size = self.b.shape[1] * self.d_in * self.groups
        for rows in chunks(self.batch_size, size, _CURVATURE_ELEMENTS):
            yield self.select(rows).explicit()

    def explicit(self) -> Outer:
        """Return the same block with all patches formed."""
        width = self.d_in - self.homogeneous
        n, positions, _ = self.b.shape
        views = self.view.shape[1]
        columns = self.view.transpose(1, 2)
        # Two steps are faster than forming the rows at once.
        columns = columns.reshape(n, views, width, -1)
        a = columns.mT.reshape(n, positions, width)
        outer = Outer(a, self.b, self.groups, self.homogeneous)
        return outer.explicit()

    def per_example(self) -> Tensor:
        """Return materialised gradients `[N * groups, d_out, d_in]`."""
        return self.explicit().per_example()


_DENSE_FRACTION = 4
"""Forming all patches is faster where one in so many, or more, is read."""


@dataclass(frozen=True)
class Lookup(_Block):
    """The gradient of an embedding table: `a` is a one-hot row that is never formed.

    Attributes:
        ids: integer row numbers `[N, T]`.
        b: output gradients `[N, T, d_out]`, zero where `ids` is the padding index.
        num_rows: rows of the table.
    """

    ids: Tensor
    b: Tensor
    num_rows: int
    kind: ClassVar[str] = "lookup"
    groups: ClassVar[int] = 1

    @classmethod
    def build(cls, ids: Tensor, b: Tensor, size: int, num_rows: int, padding: int | None) -> Lookup:
        """Build the block of ids `[size, ...]`; the row of padding has no gradients."""
        ids = ids.reshape(size, -1).long()
        b = b.reshape(*ids.shape, b.shape[-1])
        if padding is not None:
            is_padding = (ids == padding).unsqueeze(-1)
            b = b.masked_fill(is_padding, 0.0)
        return cls(ids, b, num_rows)

    @property
    def d_in(self) -> int:
        """Return the rows of the table."""
        return self.num_rows

    @property
    def gradient_shapes(self) -> dict[str, Shape]:
        """Return "" to the shape of one example's gradient, which lies as the table does."""
        return {"": (self.num_rows, self.d_out)}

    def per_example(self) -> Tensor:
        """Return materialised gradients `[N, num_rows, d_out]`, oriented as the table."""
        zeros = self.b.new_zeros(self.batch_size, self.num_rows, self.d_out)
        return self.add_per_example(zeros)

    def add_per_example(self, total: Tensor) -> Tensor:
        """Add the materialised gradients to `[N, num_rows, d_out]` in place, and return it."""
        ids = self.ids.unsqueeze(-1).expand_as(self.b)
        return total.scatter_add_(1, ids, self.b)

    def join(self, others: Sequence[Any]) -> Lookup:
        """Return several uses of one table as one block, with their positions concatenated."""
        uses = [self, *others]
        ids = torch.cat([use.ids for use in uses], 1)
        b = torch.cat([use.b for use in uses], 1)
        return replace(self, ids=ids, b=b)

    def weighted_sum(self, weights: Tensor, excluded: Tensor | None = None) -> Tensor:
        """Return Σ_n weights_n g_n as `[num_rows, d_out]`."""
        zeros = self.b.new_zeros(self.num_rows, self.d_out)
        return self.add_rows(zeros, _weigh(self.b, weights, excluded))

    def sum_by_row(self, weights: Tensor, excluded: Tensor | None = None) -> Tensor:
        """Return `weighted_sum` as a sparse tensor of the rows that were read."""
        rows = _weigh(self.b, weights, excluded).flatten(0, 1)
        ids = self.ids.flatten().unsqueeze(0)
        shape = (self.num_rows, self.d_out)
        return torch.sparse_coo_tensor(ids, rows, shape, check_invariants=True).coalesce()

    def add_rows(self, total: Tensor, rows: Tensor) -> Tensor:
        """Add rows `[N, T, d_out]` at `ids` to `[num_rows, d_out]` in place, and return it."""
        ids = self.ids.flatten()
        return total.index_add_(0, ids, rows.flatten(0, 1))

    def scale_rows(self, metric: Eigenbasis) -> Lookup:
        """Return a lookup whose gradients have the norms of this one's in a metric.

        Raises:
            ValueError: a metric that rotates the rows of a table.
        """
        if metric.input is not None:
            raise ValueError("the input side of an embedding cannot be rotated; use a diagonal one")
        b = self.b
        if metric.output is not None:
            b = b @ metric.output
        scale = metric.scale.T[self.ids]
        return replace(self, b=b * scale)

    def find_same_ids(self) -> Tensor:
        """Return which two positions of an example read the same row, `[N, T, T]`."""
        return self.ids.unsqueeze(2) == self.ids.unsqueeze(1)

    def sum_gradients(self) -> Tensor:
        """Return Σ_n g_n `[num_rows, d_out]` in float64."""
        b = self.b.double()
        zeros = b.new_zeros(self.num_rows, self.d_out)
        return self.add_rows(zeros, b)

    def sum_squares(self) -> Tensor:
        """Return Σ_n g_n², entry by entry, `[num_rows, d_out]` in float64.

        Rows that an example reads twice add up before the square.
        """
        b = self.b.double().flatten(0, 1)
        examples = torch.arange(self.batch_size, device=self.ids.device)
        first_keys = examples.unsqueeze(1) * self.num_rows
        read_keys = (self.ids + first_keys).flatten()
        keys, inverse = torch.unique(read_keys, return_inverse=True)
        sums = b.new_zeros(len(keys), self.d_out)
        sums.index_add_(0, inverse, b)
        total = b.new_zeros(self.num_rows, self.d_out)
        return total.index_add_(0, keys % self.num_rows, sums.square())

    def inner_products(self, span: Span) -> Tensor:
        """Return Σ_t L_j[id_t] · b_t, `[N, k]` in float64, from the rows that were read."""
        vectors = span.vectors[""].to(self.b.dtype)
        k = span.rank

        def multiply(part: Lookup) -> Tensor:
            gathered = vectors[:, part.ids]
            return torch.einsum("kntd,ntd->nk", gathered, part.b).double()

        entries = self.b.shape[1] * self.d_out
        return self.map_examples(multiply, k * entries, shape=(k,))


@dataclass(frozen=True)
class PerExample(_Block):
    """Materialised per-example gradients of small or irregular parameters.

    Attributes:
        grads: role of the parameter in its module (for example `weight`) to
            `[N, *parameter.shape]`.
    """

    grads: Tensors
    kind: ClassVar[str] = "elementwise"
    groups: ClassVar[int] = 1

    @property
    def like(self) -> Tensor:
        """Return gradients with the coarsest type of all roles."""
        return max(self.grads.values(), key=roundoff)

    def _map_roles(self, function: Callable[[Tensor], _Result]) -> dict[str, _Result]:
        """Return role to the value of a function of the role's gradients."""
        return {role: function(g) for role, g in self.grads.items()}

    @property
    def side_shapes(self) -> dict[str, Shape]:
        """Return role to the shape of the parameter."""
        return self._map_roles(lambda g: tuple(g.shape[1:]))

    @property
    def gradient_shapes(self) -> dict[str, Shape]:
        """Return role to the shape of one example's gradient, the roles in order."""
        return dict(sorted(self.side_shapes.items()))

    def flatten(self) -> Tensor:
        """Return gradients `[N, numel]`, the roles of `gradient_shapes` side by side."""
        (flat,) = self.iterate_flat()
        in_order = [flat[role] for role in self.gradient_shapes]
        return torch.cat(in_order, 1)

    @property
    def num_entries(self) -> int:
        """Return the entries of one example's gradient."""
        sizes = map(math.prod, self.side_shapes.values())
        return sum(sizes)

    def select(self, rows: RowIndex) -> PerExample:
        """Return the block of the examples start … stop."""
        return PerExample(self._map_roles(lambda g: g[rows]))

    def merge_rows(self, count: int, size: int) -> PerExample:
        """Return the block of `count` examples, each the sum of `size` consecutive rows."""
        rows = self.select(slice(0, count * size))
        if size == 1:
            return rows

        def add_rows(g: Tensor) -> Tensor:
            return g.unflatten(0, (count, size)).sum(1)

        return PerExample(rows._map_roles(add_rows))

    def join(self, others: Sequence[Any]) -> PerExample:
        """Return several uses of one module as one block, with their gradients added."""
        total = {}
        for role in self.grads:
            uses = [block.grads[role] for block in (self, *others)]
            total[role] = torch.stack(uses).sum(0)
        return PerExample(total)

    def weighted_sum(self, weights: Tensor, excluded: Tensor | None = None) -> Tensors:
        """Return role to Σ_n weights_n g_n."""

        def add(g: Tensor) -> Tensor:
            w = weights.to(g.dtype)
            g = _mask(g, excluded)
            return torch.tensordot(w, g, dims=1)

        return self._map_roles(add)

    def sum_gradients(self) -> Tensors:
        """Return role to Σ_n g_n in float64."""
        return self._map_roles(lambda g: g.double().sum(0))

    def sum_squares(self) -> Tensors:
        """Return role to Σ_n g_n², entry by entry, in float64."""
        return self._map_roles(lambda g: g.double().square().sum(0))

    def iterate_flat(self) -> Iterator[Tensors]:
        """Yield role to gradients `[N, numel]` once."""
        yield self._map_roles(lambda g: g.unsqueeze(-1).flatten(1))


@dataclass(frozen=True)
class Tied(_Block):
    """The gradient `[V, d]` of one weight that is an embedding table and a linear layer's weight.

    Attributes:
        lookup: its uses as a table. `b` `[N, S, d]` are gradients at the embedding's output, and S
            may be 0.
        outer: its uses as a linear layer, a `[N, T, d]` and b `[N, T, V]`. T may be 0.
    """

    lookup: Lookup
    outer: Outer
    kind: ClassVar[str] = "tied"
    groups: ClassVar[int] = 1

    @property
    def like(self) -> Tensor:
        """Return a tensor with the type and the device of the gradients."""
        return self.outer.b

    @property
    def d_in(self) -> int:
        """Return the width of the table."""
        return self.outer.d_in

    @property
    def d_out(self) -> int:
        """Return the rows of the table."""
        return self.lookup.num_rows

    def per_example(self) -> Tensor:
        """Return materialised gradients of the sum of uses `[N, V, d]`."""
        return self.lookup.add_per_example(self.outer.per_example())

    def weighted_sum(self, weights: Tensor, excluded: Tensor | None = None) -> Tensor:
        """Return Σ_n weights_n g_n as `[V, d]`."""
        total = self.outer.weighted_sum(weights, excluded)
        rows = _weigh(self.lookup.b, weights, excluded)
        return self.lookup.add_rows(total, rows)

    def read_outputs(self) -> Tensor:
        """Return the output gradients of the linear use at the ids read, `[N, T, S]`."""
        outputs = self.outer.b
        ids = self.lookup.ids.unsqueeze(1)
        ids = ids.expand(-1, outputs.shape[1], -1)
        return outputs.gather(2, ids)

    def sum_gradients(self) -> Tensor:
        """Return Σ_n g_n `[V, d]` in float64."""
        (total,) = self.outer.sum_gradients()
        return self.lookup.add_rows(total, self.lookup.b.double())

    def sum_squares(self) -> Tensor:
        """Return Σ_n g_n², entry by entry, `[V, d]` in float64."""
        total = self.like.new_zeros(self.d_out, self.d_in, dtype=torch.float64)
        for rows in _summed_chunks(self.batch_size, total.numel()):
            gradients = self.select(rows).double().per_example()
            total += gradients.square().sum(0)
        return total


@dataclass(frozen=True)
class MaterializedGradients(_Block):
    """Materialised gradients of a matrix-shaped layer.

    Attributes:
        gradients: `[N * groups, d_out, d_in]`, the bias as last column. Gradients of an embedding
            are `[N, num_rows, d_out]`.
        groups: groups of a grouped convolution.
        crosswise: the matrix lies as an embedding's table does, so that a metric maps its
            transpose.
    """

    gradients: Tensor
    groups: int = 1
    crosswise: bool = False

    @property
    def like(self) -> Tensor:
        """Return the gradients."""
        return self.gradients

    @property
    def num_entries(self) -> int:
        """Return the entries of one example's gradient."""
        _, rows, columns = self.gradients.shape
        return self.groups * rows * columns

    def per_example(self) -> Tensor:
        """Return the gradients as they are."""
        return self.gradients

    def merge_rows(self, count: int, size: int) -> MaterializedGradients:
        """Return the block of `count` examples, each the sum of `size` consecutive rows."""
        g = self.gradients[: count * size * self.groups]
        if size > 1:
            records = g.unflatten(0, (count, size, self.groups))
            g = records.sum(1).flatten(0, 1)
        return replace(self, gradients=g)

    def weighted_sum(self, weights: Tensor, excluded: Tensor | None = None) -> Tensor:
        """Return Σ_n weights_n g_n as `[groups * d_out, d_in]`."""
        g = _mask(self.gradients, excluded, self.groups)
        rows = g.reshape(len(weights), self.num_entries)
        total = weights.to(g.dtype) @ rows
        return total.view(-1, g.shape[-1])


# --------------------------------------------------------------------------------------------------
# Convolutions in the normal form: patches are rows of `a`, output positions are the shared axis.

_WEIGHT_GRADIENT = {1: conv1d_weight, 2: conv2d_weight, 3: conv3d_weight}
# Then a product with a copy of the patches beats the convolution: a row of at most so many columns,
# more where convolutions cannot work on eight channels at once, or at most so many positions and
# more than so many entries of a gradient.
_FEW_COLUMNS = 33
_FEW_COLUMNS_OF_FEW_CHANNELS = 129
_FEW_POSITIONS = 64
_MANY_ENTRIES = 1 << 15
# A processor compiles a convolution for each number of examples, which sampling changes in every
# step. Nearly equal parts of at most this many come in few sizes.
_EXAMPLES_AT_ONCE = 32
_PATCH_ENTRIES = 1 << 20  # of copied patches, so that they stay in a cache


@dataclass(frozen=True)
class ConvBlock(_Block):
    """A convolution's inputs and output gradients before any patch is formed.

    Attributes:
        x: inputs `[N * views, c_in, *spatial]`, already padded unless `padding` is non-zero.
        b: output gradients `[N * views, c_out, *positions]`.
        kernel, stride, padding, dilation: one integer per spatial axis.
        groups: groups of the convolution.
        weight, bias: whether each is trained.
        views: consecutive rows whose gradients add up to the gradient of ONE example.
    """

    x: Tensor
    b: Tensor
    kernel: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    groups: int
    weight: bool
    bias: bool
    views: int = 1

    @property
    def batch_size(self) -> int:
        """Return the number of examples N."""
        return self.x.shape[0] // self.views

    @property
    def settings(self) -> ConvBlock:
        """Return the block with the shapes of its tensors in their place."""
        shapes: dict[str, Any] = {"x": self.x.shape, "b": self.b.shape}
        return replace(self, **shapes)

    @property
    def positions(self) -> int:
        """Return the output positions T of one example, over all its views."""
        return self.views * math.prod(self.b.shape[2:])

    @property
    def d_in(self) -> int:
        """Return the width of a patch row of one group, the homogeneous coordinate included."""
        channels = self.x.shape[1] // self.groups
        width = channels * math.prod(self.kernel)
        return self.weight * width + self.bias

    @property
    def d_out(self) -> int:
        """Return the output channels of one group."""
        return self.b.shape[1] // self.groups

    @property
    def dimensions(self) -> tuple[int, int, int]:
        """Return positions T, input features d_in and output features d_out."""
        return self.positions, self.d_in, self.d_out

    def merge_rows(self, count: int, size: int) -> ConvBlock:
        """Return the block of `count` examples, each the sum of `size` consecutive rows."""
        rows = self.select(slice(0, count * size))
        return replace(rows, views=self.views * size)

    def join(self, others: Sequence[Any]) -> ConvBlock | Outer:
        """Return several calls of one convolution as one block.

        The calls become views where their shapes agree. Otherwise their patches are formed.
        """
        joined = interleave_calls([self, *others])
        return joined or self.outer().join(others)

    def outer(self) -> Outer:
        """Return the explicit form: a `[N * groups, T, d_in]`, b `[N * groups, T, d_out]`."""
        return Outer(self._input_rows(), self._output_rows(), self.groups)

    def make_factor_block(self) -> Outer | Patched:
        """Return the block as factors are computed from it, with its patches not formed yet.

        It is explicit where the bias alone is trained, which reads no patch.
        """
        if not self.weight:
            return self.outer()
        windows = self._windows()
        by_view = windows.unflatten(0, (self.batch_size, self.views))
        by_group = by_view.unflatten(2, (self.groups, -1))
        return Patched(by_group, self._output_rows(), self.bias)

    def _output_rows(self) -> Tensor:
        """Return the output gradients as rows `[N * groups, T, d_out]`."""
        by_group = self.b.unflatten(1, (self.groups, self.d_out))
        columns = by_group.flatten(0, 1).flatten(2)
        return self._merge_views(columns)

    def _input_rows(self) -> Tensor:
        """Return patches and the ones of the bias as rows `[N * groups, T, d_in]`."""
        positions = self.b.shape[2:]
        windows = self._windows().unflatten(1, (self.groups, -1))
        width = self.d_in - self.bias
        columns = windows.new_empty(*windows.shape[:2], self.d_in, *positions)
        if self.weight:
            columns[:, :, :width].view_as(windows).copy_(windows)
        columns[:, :, width:] = 1
        return self._merge_views(columns.flatten(3).flatten(0, 1))

    def project_patches(self, vectors: Tensor) -> Tensor:
        """Return Vᵀ a `[N * groups, k, T]` of all rows a for V `[d_in, k]`, without the patches."""
        k = vectors.shape[1]
        channels = self.x.shape[1] // self.groups
        filters = vectors[: self.d_in - self.bias].T.reshape(k, channels, *self.kernel)
        ones = vectors[-1].repeat(self.groups) if self.bias else None
        filters = filters.repeat(self.groups, *[1] * (filters.dim() - 1))
        settings = (self.stride, self.padding, self.dilation, False, (0,), self.groups)
        columns = torch.convolution(self.x, filters, ones, *settings)
        by_group = columns.unflatten(1, (self.groups, k)).flatten(3).flatten(0, 1)
        return self._merge_views(by_group).mT

    def _merge_views(self, columns: Tensor) -> Tensor:
        """Return rows `[N * groups, T, d]` from columns `[N * views * groups, d, T / views]`."""
        return _merge_positions(columns.mT, self.batch_size, self.views, self.groups)

    def _windows(self) -> Tensor:
        """Return a strided view of the padded input, `[N * views, c_in, *kernel, *positions]`."""
        pads = []
        for size in reversed(self.padding):
            pads += [size, size]
        x = F.pad(self.x, pads) if any(pads) else self.x.contiguous()
        positions = self.b.shape[2:]
        shape = (*x.shape[:2], *self.kernel, *positions)
        example, channel, *steps = x.stride()
        kernel_strides = map(operator.mul, steps, self.dilation)
        position_strides = map(operator.mul, steps, self.stride)
        strides = (example, channel, *kernel_strides, *position_strides)
        return x.as_strided(shape, strides)

    def per_example(self) -> Tensor:
        """Return materialised gradients `[N * groups, d_out, d_in]` by grouped convolutions.

        Examples are their groups and views their batch. Where a gradient is smaller than what it is
        made of, each view has its own gradient and these are added, so that nothing is copied.
        """
        n = self.batch_size
        activations = self.x[:1].numel() + self.b[:1].numel()
        if self.views > 1 and self.num_entries <= activations:
            each = replace(self, views=1).per_example()
            views = MaterializedGradients(each, self.groups)
            return views.merge_rows(n, self.views).gradients
        is_short = self.positions <= _FEW_POSITIONS and self.d_in * self.d_out > _MANY_ENTRIES
        has_few_channels = self.b.is_cpu and self.x.shape[1] < 8
        columns = _FEW_COLUMNS_OF_FEW_CHANNELS if has_few_channels else _FEW_COLUMNS
        width = self.d_in - self.bias
        gradients = self.b.new_empty(n, self.groups, self.d_out, self.d_in)
        if not self.weight or self.d_in <= columns or is_short:
            most = _PATCH_ENTRIES if self.b.is_cpu else None
            for rows in chunks(n, self.positions * self.d_in, most):
                part, out = self.select(rows), gradients[rows].flatten(0, 1)
                torch.bmm(part._output_rows().mT, part._input_rows(), out=out)
            return gradients.flatten(0, 1)
        parts = -(-n // _EXAMPLES_AT_ONCE) if self.b.is_cpu else 1
        for rows in chunks(n, parts, n + parts - 1):
            part = self.select(rows)
            x = part._examples_as_channels(part.x)
            b = part._examples_as_channels(part.b)
            into = gradients[rows, ..., :width]
            into.copy_(self._weight_gradient(x, b, part.batch_size).reshape(into.shape))
        if self.bias:
            by_view = self.b.flatten(2).sum(-1)
            of_bias = by_view.unflatten(0, (n, self.views)).sum(1)
            gradients[..., width] = of_bias.view(n, self.groups, self.d_out)
        return gradients.flatten(0, 1)

    def _examples_as_channels(self, x: Tensor) -> Tensor:
        """Return `[views, N * c, *spatial]` from `[N * views, c, *spatial]`."""
        by_view = x.unflatten(0, (self.batch_size, self.views))
        return by_view.transpose(0, 1).flatten(1, 2)

    def weighted_sum(self, weights: Tensor, excluded: Tensor | None = None) -> Tensor:
        """Return Σ_n weights_n g_n as `[c_out, d_in]`, without forming any g_n."""
        b = _weigh(self.b, weights, excluded, self.views)
        parts = []
        if self.weight:
            x = _mask(self.x, excluded, self.views)
            parts.append(self._weight_gradient(x, b, 1).flatten(1))
        if self.bias:
            parts.append(b.flatten(2).sum((0, 2)).unsqueeze(-1))
        return torch.cat(parts, -1) if parts[1:] else parts[0]

    def _weight_gradient(self, x: Tensor, b: Tensor, copies: int) -> Tensor:
        """Return the weight gradient of a convolution with `copies` times the groups.

        Its shape is `[copies * c_out, c_in / groups, *kernel]`.
        """
        channels_in = self.x.shape[1] // self.groups
        channels_out = copies * self.b.shape[1]
        shape = (channels_out, channels_in, *self.kernel)
        backward = _WEIGHT_GRADIENT[len(self.kernel)]
        groups = self.groups * copies
        return backward(x, shape, b, self.stride, self.padding, self.dilation, groups)

    def count_positions(self) -> Tensor:
        """Return how many output positions of each example have a gradient, `[N]`."""
        if _is_channels_last(self.b):
            # Reductions over a short last axis are slow. A sum of |b| is 0 where all of b is.
            rows = self.b.movedim(1, -1).flatten(0, -2)
            rows = rows.abs()
            ones = rows.new_ones(rows.shape[1])
            sizes = torch.mv(rows, ones)
            sizes = sizes.view(len(self.b), -1)
        else:
            # Three times as fast as any(), and NaN is not zero.
            sizes = self.b.abs().amax(1).flatten(1)
        counts = (sizes != 0).sum(1)
        return sum_groups(counts, self.views)


Block = Outer | Patched | Lookup | PerExample | Tied
"""What curvature reads."""
Blocks = Mapping[str, Block]
"""Layer name to block; a mapping may form blocks on demand."""
AnyBlock = Outer | Lookup | PerExample | Tied | ConvBlock | MaterializedGradients
"""What clipping reads."""


def _summed_chunks(count: int, size: int) -> Iterator[slice]:
    """Yield the examples whose gradients of `size` entries are formed and added at once."""
    yield from chunks(count, size, _CURVATURE_ELEMENTS + size - 1)


def _merge_positions(x: Tensor, count: int, size: int, groups: int = 1) -> Tensor:
    """Return `[count * groups, size * T, ...]` from `[N * groups, T, ...]`."""
    rows = x[: count * size * groups]
    by_example = rows.unflatten(0, (count, size, groups))
    by_group = by_example.transpose(1, 2)
    return by_group.flatten(2, 3).flatten(0, 1)


def _append_ones(rows: Tensor) -> Tensor:
    """Return `[..., d + 1]` from `[..., d]`, the homogeneous coordinate last."""
    ones = rows.new_ones(*rows.shape[:-1], 1)
    return torch.cat([rows, ones], -1)


def _is_channels_last(x: Tensor) -> bool:
    if x.is_contiguous():
        return False
    return x.movedim(1, -1).is_contiguous()


def rows_in_memory_order(x: Tensor) -> Tensor:
    """Return a view of `[N, c, *spatial]` as rows `[N, c * prod(spatial)]`, in memory order."""
    if _is_channels_last(x):
        x = x.movedim(1, -1)
    return x.flatten(1)


def join_uses(blocks: Sequence[AnyBlock]) -> AnyBlock:
    """Return several uses of one layer as one block, whose gradient is their sum.

    Where one of them is materialised, all are.
    """
    if len(blocks) == 1:
        return blocks[0]
    for block in blocks:
        if isinstance(block, MaterializedGradients):
            uses = [x.per_example() for x in blocks]  # type: ignore[union-attr]
            gradients = torch.stack(uses).sum(0)
            return replace(block, gradients=gradients)
    first: Any = blocks[0]
    joined: AnyBlock = first.join(blocks[1:])
    return joined


def interleave_calls(blocks: Sequence[Any]) -> ConvBlock | None:
    """Return several calls of one convolution as one block, or None where their shapes differ.

    The calls become views of the block.
    """
    first = blocks[0]
    if any(block.settings != first.settings for block in blocks):
        return None
    by_view = (first.batch_size, first.views)
    x = torch.cat([block.x.unflatten(0, by_view) for block in blocks], 1)
    b = torch.cat([block.b.unflatten(0, by_view) for block in blocks], 1)
    views = first.views * len(blocks)
    return replace(first, x=x.flatten(0, 1), b=b.flatten(0, 1), views=views)


def conv_block(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor, b: Tensor) -> ConvBlock:
    """Return the block of one call of a convolution module.

    Args:
        module: the convolution.
        x: its input `[N, c_in, *spatial]`.
        b: gradient of the summed losses with respect to its output `[N, c_out, *positions]`.
    """
    padding = (0,) * len(module.kernel_size)
    if module.padding_mode != "zeros":
        x = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
    elif isinstance(module.padding, str):
        x = F.pad(x, module._reversed_padding_repeated_twice)
    else:
        padding = module.padding
    return ConvBlock(
        x=x,
        b=b,
        kernel=module.kernel_size,
        stride=module.stride,
        padding=padding,
        dilation=module.dilation,
        groups=module.groups,
        weight=module.weight.requires_grad,
        bias=module.bias is not None and module.bias.requires_grad,
    )
