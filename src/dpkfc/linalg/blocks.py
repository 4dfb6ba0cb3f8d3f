"""Normal forms of what one layer contributes to the per-example gradients of a batch.

With inputs `a_t` and output gradients `b_t` at position t the gradient of example n is
`g_n = Σ_t b_nt a_ntᵀ`. Every covered layer is reduced to one of a few blocks. A block can select
examples, merge rows, sum with weights, materialise its gradients and bound what rounding loses.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from dpkfc.linalg.metric import Eigenbasis, Entry, Identity, Kronecker, NamedTensors, Span

# --------------------------------------------------------------------------------------------------
# Deferred flags: questions about the values of a GPU tensor, read all at once, so that the host
# waits for the GPU once a micro-batch and not once a layer.

_DEFERRED: ContextVar[list[Tensor] | None] = ContextVar("deferred", default=None)


def is_on_accelerator(x: Tensor) -> bool:
    """Return whether reading a number of x makes the host wait for another device."""
    return x.device.type != "cpu"


def is_any_set(flags: Tensor) -> bool:
    """Return whether any flag is set.

    Inside `defer_flags` it returns False for flags on another device and stores the question.
    """
    deferred = _DEFERRED.get()
    if deferred is None or not is_on_accelerator(flags):
        return bool(flags.any())
    deferred.append(flags.any())
    return False


@contextmanager
def defer_flags() -> Iterator[list[Tensor]]:
    """Collect the questions that `is_any_set` leaves open in the body, each one flag `[]`.

    Results of the body are valid where every flag turns out to be False.
    """
    deferred: list[Tensor] = []
    token = _DEFERRED.set(deferred)
    try:
        yield deferred
    finally:
        _DEFERRED.reset(token)


# --------------------------------------------------------------------------------------------------
# Norms of rows, rounding and chunks.

Rows = slice | Tensor
"""Examples of a block: from start to stop, or those of a mask `[N]`."""
TINY = 2.0**-80
"""Squared norms below it may have lost terms that are too small for float32."""
_SHORT = 64  # longest piece of a row that is summed in float32
_CACHED = 1 << 18  # entries whose copy in float64 stays in the caches of a processor
_REACH = 2.0**100
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
    return x[index // x.shape[1], index % x.shape[1]]


def sum_squares(x: Tensor) -> Tensor:
    """Return Σ x² over the last axis without overflow or underflow in float32."""
    return x.double().square().sum(-1)


def roundoff(x: Tensor) -> float:
    """Return the unit roundoff of the type of a tensor."""
    return torch.finfo(x.dtype).eps / 2


def raise_precision(x: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 as it is.

    Gradients, norms, sums and noise live in these types whatever the model computes in.
    """
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def dot_rounding(length: int) -> float:
    """Return how many units of roundoff a dot product loses (Higham and Mary 2019)."""
    return min(float(length), 4 * math.sqrt(length))


def row_norms(x: Tensor) -> Tensor:
    """Return upper bounds of the norms over the last axis, in float64, each of its own row.

    The sum of k squares in float32 is off by a fraction of at most (k + 2) u. Rows are therefore
    cut into short pieces, whose sums are added in float64. The bound is tight, since another method
    may bound the same example in a neighbouring batch, where it may move by rounding alone. Rows
    whose squares leave the range of float32 are recomputed in float64. On a GPU, whose values
    the host does not wait for, such rows are bounded by √d times their largest entry.
    """
    d = x.shape[-1]
    if x.dtype != torch.float32:
        return exact_row_norms(x)
    square = _add_squares_of_pieces(x)
    fraction_lost = (min(d, _SHORT) + 2) * torch.finfo(x.dtype).eps
    norms = (square * (1 + fraction_lost)).sqrt()
    # False for NaN. Each entry may lose a square that is too small for float32.
    least = TINY * max(1.0, d / 4096)
    is_in_range = (square >= least) & (square < math.inf)
    if d and is_on_accelerator(x):
        largest = torch.linalg.vector_norm(x, math.inf, dim=-1)
        bounds = largest.double() * math.sqrt(d)
        return torch.where(is_in_range, norms, bounds)
    if not is_in_range.all():
        unsafe = ~is_in_range
        norms[unsafe] = exact_row_norms(x[unsafe])
    return norms


def _add_squares_of_pieces(x: Tensor) -> Tensor:
    """Return the sum of squares over the last axis, in float32 within a piece of `_SHORT`."""
    whole = x.shape[-1] // _SHORT * _SHORT
    rest = torch.linalg.vector_norm(x[..., whole:], dim=-1)
    square = rest.double().square()
    if not whole:
        return square
    pieces = x[..., :whole].unflatten(-1, (-1, _SHORT))
    norms = torch.linalg.vector_norm(pieces, dim=-1)
    return square + norms.double().square().sum(-1)


def exact_row_norms(x: Tensor) -> Tensor:
    """Return the norms over the last axis, computed in float64."""
    if x.numel() <= _CACHED or x.dtype == torch.float64 or is_on_accelerator(x):
        return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    # A few rows at a time: a copy of all rows in float64 would leave the caches of a processor.
    d = x.shape[-1]
    rows = x.reshape(-1, d)
    rows_at_once = max(1, _CACHED // d)
    parts = rows.split(rows_at_once)
    norms = [torch.linalg.vector_norm(part.double(), dim=-1) for part in parts]
    return torch.cat(norms).view(x.shape[:-1])


def limit_inputs(norms: Tensor, inputs: Tensor) -> Tensor:
    """Return norms of a layer's inputs, infinite beyond 2¹⁰⁰ in float32, which drops the example.

    The sum would multiply such inputs with output gradients times a clip factor below the least
    normal number. Their rounding would be more than the clip allows.
    """
    if inputs.dtype != torch.float32:
        return norms
    return norms.masked_fill(norms > _REACH, math.inf)


def count_moved(b: Tensor) -> Tensor:
    """Return how many positions of rows `[N, T, d]` have a gradient, `[N]`."""
    return (b != 0).any(-1).sum(1)


def _repeat(rows: Rows, each: int) -> Rows:
    """Return which entries of an axis that holds `each` entries for every example are meant."""
    if isinstance(rows, slice):
        return slice(rows.start * each, rows.stop * each)
    return rows.repeat_interleave(each)


def _mask(x: Tensor, excluded: Tensor | None, each: int = 1) -> Tensor:
    """Return x with the rows of excluded examples set to zero, `each` rows an example."""
    if excluded is None:
        return x
    return x.masked_fill(_align(excluded.repeat_interleave(each), x), 0)


def _weigh(x: Tensor, weights: Tensor, excluded: Tensor | None, each: int = 1) -> Tensor:
    """Return x times the weights of its examples, `each` rows an example, and 0 for excluded."""
    weights = weights.to(x.dtype).repeat_interleave(each)
    x = _mask(x, excluded, each)
    return x * _align(weights, x)


def _align(values: Tensor, x: Tensor) -> Tensor:
    """Return one value a row of x `[n, ...]` in a shape that broadcasts over x."""
    ones = [1] * (x.dim() - 1)
    return values.view(-1, *ones)


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """Return `[N]` from `[N * groups]`."""
    return x.view(-1, groups).sum(1)


# --------------------------------------------------------------------------------------------------
# Blocks. All of them share these methods:
#
#   select(rows)            the block of the examples start … stop, or of a mask
#   merge_rows(count, size) the block of `count` examples, each the sum of `size` consecutive rows
#   weighted_sum(w, bad)    Σ_n w_n g_n. The rows of examples in the mask `bad`, whose gradients are
#                           not finite, are zeroed first, since 0 · NaN is NaN.
#   join(others)            several uses of one layer as one block: the gradient is their sum
#   iterate_flat()          role to materialised gradients [n, numel], some examples at a time
#   inner_products(span)    ⟨L_j, g_n⟩ over one layer, [N, k] in float64
#   product_error(...)      upper bound [N] of the rounding of those inner products
#
# Those that curvature reads have these too:
#
#   side_shapes             side, or role of an elementwise layer, to its shape
#   squared_norms(entry)    ‖z_n‖² of an entry of a metric, [N] in float64, without a bound
#   sum_gradients()         Σ_n g_n in float64
#   sum_squares()           Σ_n g_n², entry by entry, in float64


_Form = TypeVar("_Form", bound="_Block")
_Result = TypeVar("_Result")


class _Block:
    """What most blocks share.

    Attributes:
        kind: kind of the factors of the layer, None where none are known.
        dimensions: positions T, input features and output features of a matrix-shaped layer whose
            norm method is chosen, None for others.
        settings: of a convolution, None for others.
        matrix: the block itself if it has `dimensions`, else None.
    """

    kind: ClassVar[str | None] = None
    dimensions: Any = None
    settings: Any = None
    matrix: Any = None

    def select(self: _Form, rows: Rows) -> _Form:
        """Return the block of the examples start … stop, or of a mask."""
        block: Any = self
        size = max(1, block.batch_size)
        parts = {}
        for field in fields(block):
            x = getattr(block, field.name)
            if isinstance(x, Tensor):
                parts[field.name] = x[_repeat(rows, len(x) // size)]
        selected: _Form = replace(block, **parts)
        return selected

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
        return len(self.b) // self.groups

    @property
    def d_out(self) -> int:
        """Return the output features."""
        return self.like.shape[-1]

    @property
    def side_shapes(self: Any) -> dict[str, tuple[int, ...]]:
        """Return side, or role of an elementwise layer, to its shape."""
        return {"input": (self.d_in,), "output": (self.d_out,)}

    @property
    def num_entries(self: Any) -> int:
        """Return the entries of one example's gradient."""
        entries: int = self.groups * self.d_out * self.d_in
        return entries

    @property
    def gradient_shapes(self: Any) -> dict[str, tuple[int, ...]]:
        """Return role to the shape of one example's gradient, "" for a matrix `[rows, columns]`."""
        first = self.select(slice(0, 1))
        columns = first.per_example().shape[-1]
        return {"": (self.num_entries // columns, columns)}

    def flatten(self: Any) -> Tensor:
        """Return gradients `[N, numel]`, the roles of `gradient_shapes` side by side."""
        gradients: Tensor = self.per_example()
        return gradients.reshape(self.batch_size, -1)

    def squared_norms(self: Any, entry: Entry | None) -> Tensor:
        """Return ‖z_n‖² in an entry of a metric, `[N]` in float64, up to rounding.

        These numbers choose a scale and draw pictures. The certified norms are those of
        `per_example_norms`.

        Args:
            entry: None for the identity, as is an entry for another kind of layer.
        """
        if isinstance(entry, Eigenbasis):
            basis = entry.complete_basis()
            norms: Tensor = self._rotated_squares(basis)
        else:
            sides = entry if isinstance(entry, Kronecker) else Kronecker()
            norms = self._mapped_squares(sides)
        return norms

    def map_examples(
        self: Any,
        function: Callable[[Any], Tensor],
        elements_each: int,
        most: int | None = None,
        shape: tuple[int, ...] = (),
    ) -> Tensor:
        """Return numbers `[N, *shape]` in float64, each of its own example.

        Some examples are processed at a time.

        Args:
            function: from a block to its numbers.
            elements_each: what `function` holds for one example.
            most: elements at once, None for the limit of the clipped sum.
            shape: of the numbers of one example.
        """
        pieces = [self.like.new_zeros(0, *shape, dtype=torch.float64)]
        pieces += map(function, map(self.select, chunks(self.batch_size, elements_each, most)))
        return torch.cat(pieces)

    def _rotated_squares(self: Any, entry: Eigenbasis) -> Tensor:
        """Return ‖z_n‖² from materialised gradients."""

        def square(part: Any) -> Tensor:
            z = entry.rotate(part.per_example()) * entry.scale
            squares = sum_squares(z.flatten(1))
            return _sum_groups(squares, self.groups)

        squares: Tensor = self.map_examples(square, entry.scale.numel(), _CURVATURE_ELEMENTS)
        return squares

    def iterate_flat(self: Any) -> Iterator[NamedTensors]:
        """Yield role to materialised gradients `[n, numel]`, of some examples at a time.

        The role is "" for the matrix of weight and bias.
        """
        size = self.num_entries
        for rows in chunks(self.batch_size, size):
            yield {"": self.select(rows).per_example().reshape(-1, size)}

    def inner_products(self: Any, span: Span) -> Tensor:
        """Return ⟨L_j, g_n⟩ `[N, k]` in float64."""
        pieces = [self.like.new_zeros(0, span.rank, dtype=torch.float64)]
        for part in self.iterate_flat():
            products = []
            for role, g in part.items():
                directions = span.vectors[role].reshape(span.rank, -1).to(g.dtype)
                products.append((g @ directions.T).double())
            pieces.append(torch.stack(products).sum(0))
        return torch.cat(pieces)

    def count_terms(self) -> tuple[Any, Any]:
        """Return Σ_t ‖a_t‖ ‖b_t‖ and its terms `[N]`, 0 for gradients that are not formed again."""
        return 0.0, 0.0

    def product_error(self: Any, span: Span, norms: Tensor, gain: float) -> Tensor:
        """Return an upper bound `[N]` of the rounding of `inner_products`.

        It counts the rounding of gradients that are formed again for the sum too.
        """
        magnitudes, terms = self.count_terms()
        products = dot_rounding(span.size) * span.length * norms
        return roundoff(self.like) * (products + 2 * terms * gain * magnitudes)


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

    @property
    def d_in(self) -> int:
        """Return the input features, the homogeneous coordinate included."""
        return self.a.shape[2] + self.homogeneous

    @property
    def dimensions(self) -> tuple[int, int, int]:
        """Return positions T, input features d_in and output features d_out."""
        return self.a.shape[1], self.d_in, self.d_out

    @property
    def matrix(self) -> Outer:
        """Return the block itself."""
        return self

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
        return Outer(_append_ones(self.a), self.b, self.groups)

    def double(self) -> Outer:
        """Return the block in float64."""
        return replace(self, a=self.a.double(), b=self.b.double())

    def per_example(self) -> Tensor:
        """Return materialised gradients `[N * groups, d_out, d_in]`."""
        return torch.bmm(self.b.transpose(1, 2), self.explicit().a)

    def merge_rows(self, count: int, size: int) -> Outer:
        """Return the block of `count` examples, each the sum of `size` consecutive rows."""
        a = _merge_positions(self.a, count, size, self.groups)
        b = _merge_positions(self.b, count, size, self.groups)
        return replace(self, a=a, b=b)

    def join(self, others: Sequence[Any]) -> Outer:
        """Return several uses of one layer as one block, with their positions concatenated."""
        outers = [self, *(other.outer() for other in others)]
        a = torch.cat([x.a for x in outers], 1)
        b = torch.cat([x.b for x in outers], 1)
        return replace(self, a=a, b=b)

    def weighted_sum(self, weights: Tensor, excluded: Tensor | None = None) -> Tensor:
        """Return Σ_n weights_n g_n as `[groups * d_out, d_in]`."""
        a = _mask(self.a, excluded, self.groups)
        b = _weigh(self.b, weights, excluded, self.groups)
        if self.groups > 1:
            by_group = (len(weights), self.groups)
            a = a.unflatten(0, by_group)
            b = b.unflatten(0, by_group)
            return torch.einsum("ngto,ngti->goi", b, a).flatten(0, 1)
        rows = b.flatten(0, 1)
        total = rows.T @ a.flatten(0, 1)
        if self.homogeneous:
            total = torch.cat([total, rows.sum(0).unsqueeze(1)], 1)
        return total

    def inner_products(self, span: Span) -> Tensor:
        """Return ⟨L_j, g_n⟩ `[N, k]` in float64, for one position as bᵀ L_j a."""
        if self.groups != 1 or self.a.shape[1] != 1:
            return super().inner_products(span)
        k, d_out, d_in = span.vectors[""].shape
        directions = span.vectors[""].to(self.a.dtype).view(k * d_out, d_in)

        def multiply(part: Outer) -> Tensor:
            a = part.explicit().a[:, 0]
            b = part.b[:, 0].unsqueeze(2)
            mapped = (a @ directions.T).view(-1, k, d_out)
            products = torch.bmm(mapped, b)
            return products[:, :, 0].double()

        return self.map_examples(multiply, k * d_out, shape=(k,))

    def count_terms(self) -> tuple[Tensor, Tensor]:
        """Return Σ_t ‖a_t‖ ‖b_t‖ over groups too, and the positions with a gradient, `[N]`."""
        positions = count_moved(self.b).double().view(-1, self.groups).amax(1)
        return self.exact_magnitudes(), positions

    def _mapped_squares(self, sides: Kronecker) -> Tensor:
        """Return ‖z_n‖² from Gram matrices or materialised gradients, whichever costs less."""
        inputs, outputs = self.explicit().a, self.b
        positions, d_in, d_out = self.dimensions
        if positions == 1:
            a = sides.input.apply(inputs[:, 0])
            b = sides.output.apply(outputs[:, 0])
            squares = sum_squares(a) * sum_squares(b)
            return _sum_groups(squares, self.groups)
        size = d_in * d_out
        has_small_gram = positions * (d_in + d_out) < size
        if has_small_gram:
            size = positions * (positions + d_in + d_out)
        pieces = []
        for rows in chunks(len(outputs), size, _CURVATURE_ELEMENTS):
            a = inputs[rows]
            b = outputs[rows]
            if has_small_gram:
                a = sides.input.apply(a)
                b = sides.output.apply(b)
                products = torch.bmm(a, a.mT).double()
                products *= torch.bmm(b, b.mT)
                squares = products.sum((1, 2)).clamp(min=0)
            else:
                g = torch.bmm(b.mT, a)
                z = sides.apply(g)
                squares = sum_squares(z.flatten(1))
            pieces.append(squares)
        return _sum_groups(torch.cat(pieces), self.groups)

    def _rows_by_group(self) -> tuple[Tensor, Tensor]:
        """Return a and b as float64 `[groups, N, T, d]`."""
        by_group = (-1, self.groups)
        a = self.a.double().unflatten(0, by_group)
        b = self.b.double().unflatten(0, by_group)
        return a.transpose(0, 1), b.transpose(0, 1)

    def sum_gradients(self) -> Tensor:
        """Return Σ_n g_n `[groups, d_out, d_in]` in float64."""
        a, b = self._rows_by_group()
        return b.flatten(1, 2).mT @ a.flatten(1, 2)

    def sum_squares(self) -> Tensor:
        """Return Σ_n g_n², entry by entry, `[groups, d_out, d_in]` in float64."""
        a, b = self._rows_by_group()
        if a.shape[2] == 1:
            # With one position the square of a product is the product of squares.
            return b[:, :, 0].square().mT @ a[:, :, 0].square()
        total = b.new_zeros(self.groups, b.shape[-1], a.shape[-1])
        for rows in _summed_chunks(self.batch_size, total.numel()):
            gradients = b[:, rows].mT @ a[:, rows]
            total += gradients.square().sum(1)
        return total

    def exact_magnitudes(self) -> Tensor:
        """Return Σ_t ‖a_t‖ ‖b_t‖ over groups too, `[N]`, from norms in float64."""
        squares = exact_row_norms(self.a).square() + self.homogeneous
        products = squares.sqrt() * exact_row_norms(self.b)
        return _sum_groups(products.sum(1), self.groups)

    def input_squares(self) -> Tensor:
        """Return ‖a_t‖² with the implied coordinate, `[N * groups, T]`, rounded up."""
        norms = row_norms(self.a)
        norms = limit_inputs(norms, self.a)
        return norms.square() + self.homogeneous

    def row_magnitudes(self) -> tuple[Tensor, Tensor]:
        """Return upper bounds of Σ_t ‖a_t‖‖b_t‖ and how many b_t are not 0, `[N * groups]`."""
        outputs = row_norms(self.b)
        products = self.input_squares().sqrt() * outputs
        return products.sum(1), (outputs > 0).sum(1)

    def magnitudes(self) -> tuple[Tensor, Tensor]:
        """Return upper bounds of Σ_t ‖a_t‖‖b_t‖ over groups too, and the positions, `[N]`."""
        sums, positions = self.row_magnitudes()
        by_group = positions.view(-1, self.groups)
        return _sum_groups(sums, self.groups), by_group.amax(1)


@dataclass(frozen=True)
class Patched(_Block):
    """An `Outer` whose inputs are patches of a convolution, formed only when they are read.

    Attributes:
        view: the patches as a strided view of the padded input,
            `[N, views, groups, c_in / groups, *kernel, *positions]`.
        b: as of `Outer`, `[N * groups, T, d_out]`. The T positions are those of the views in order.
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
        return math.prod(self.view.shape[3 : 4 + self._axes]) + self.homogeneous

    @property
    def _axes(self) -> int:
        """Return the number of spatial axes of the convolution."""
        return (self.view.dim() - 4) // 2

    def input_rows(self, index: Tensor | None) -> Tensor:
        """Return rows `[m, d_in]` of the inputs flattened over their first axes, None for all."""
        rows_in_all = self.b.shape[0] * self.b.shape[1]
        if index is None or _DENSE_FRACTION * len(index) > rows_in_all:
            return self.explicit().input_rows(index)
        first_position = 4 + self._axes
        position_dims = range(first_position, self.view.dim())
        row_dims = (0, 2, 1, *position_dims)
        ordered = self.view.permute(*row_dims, *range(3, first_position))
        place = torch.unravel_index(index, ordered.shape[: len(row_dims)])
        rows = ordered[place].flatten(1)
        return _append_ones(rows) if self.homogeneous else rows

    def squared_norms(self, entry: Entry | None) -> Tensor:
        """Return ‖z_n‖² in an entry of a metric, `[N]` in float64, up to rounding."""
        size = self.b.shape[1] * self.d_in * self.groups
        return self.map_examples(
            lambda part: part.explicit().squared_norms(entry), size, _CURVATURE_ELEMENTS
        )

    def explicit(self) -> Outer:
        """Return the same block with all patches formed."""
        width = self.d_in - self.homogeneous
        n, positions = self.b.shape[:2]
        views = self.view.shape[1]
        columns = self.view.transpose(1, 2)
        # Two steps are faster than forming the rows at once.
        columns = columns.reshape(n, views, width, -1)
        a = columns.transpose(2, 3).reshape(n, positions, -1)
        return Outer(a, self.b, self.groups, self.homogeneous).explicit()

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

    @property
    def d_in(self) -> int:
        """Return the rows of the table."""
        return self.num_rows

    def per_example(self) -> Tensor:
        """Return materialised gradients `[N, num_rows, d_out]`, oriented as the table."""
        n, _, d = self.b.shape
        return self.add_per_example(self.b.new_zeros(n, self.num_rows, d))

    def add_per_example(self, total: Tensor) -> Tensor:
        """Add the materialised gradients to `[N, num_rows, d_out]` in place, and return it."""
        ids = self.ids.unsqueeze(-1).expand_as(self.b)
        return total.scatter_add_(1, ids, self.b)

    def merge_rows(self, count: int, size: int) -> Lookup:
        """Return the block of `count` examples, each the sum of `size` consecutive rows."""
        rows = count * size
        ids = self.ids[:rows].reshape(count, size * self.ids.shape[1])
        b = self.b[:rows].reshape(*ids.shape, self.d_out)
        return replace(self, ids=ids, b=b)

    def join(self, others: Sequence[Any]) -> Lookup:
        """Return several uses of one table as one block, with their positions concatenated."""
        lookups = [self, *others]
        ids = torch.cat([x.ids for x in lookups], 1)
        b = torch.cat([x.b for x in lookups], 1)
        return Lookup(ids, b, self.num_rows)

    def weighted_sum(self, weights: Tensor, excluded: Tensor | None = None) -> Tensor:
        """Return Σ_n weights_n g_n as `[num_rows, d_out]`."""
        total = self.b.new_zeros(self.num_rows, self.d_out)
        return self.add_weighted_sum(total, weights, excluded)

    def add_weighted_sum(self, total: Tensor, weights: Tensor, excluded: Tensor | None) -> Tensor:
        """Add Σ_n weights_n g_n to `[num_rows, d_out]` in place, and return it."""
        ids = self.ids.flatten()
        rows = _weigh(self.b, weights, excluded)
        return total.index_add_(0, ids, rows.flatten(0, 1))

    def drop_row(self, row: int | None) -> Lookup:
        """Return the block without the gradients of one row, such as that of padding."""
        if row is None:
            return self
        is_dropped = (self.ids == row).unsqueeze(-1)
        return replace(self, b=self.b.masked_fill(is_dropped, 0.0))

    def scale_rows(self, metric: Eigenbasis) -> Lookup:
        """Return a lookup whose gradients have the norms that those of this one have in a metric.

        Raises:
            ValueError: a metric that rotates the rows of a table.
        """
        if metric.input is not None:
            raise ValueError("the input side of an embedding cannot be rotated; use a diagonal one")
        b = self.b if metric.output is None else self.b @ metric.output
        return replace(self, b=b * metric.scale.T[self.ids])

    def _rotated_squares(self, entry: Eigenbasis) -> Tensor:
        return self.scale_rows(entry)._mapped_squares(Kronecker())

    def _mapped_squares(self, sides: Kronecker) -> Tensor:
        """Return ‖z_n‖²; rows with the same id add up first, by a Gram matrix of equal ids."""
        b = sides.output.apply(self.b).double()
        b = sides.input.apply_at(b, self.ids)

        def square(part: Lookup) -> Tensor:
            products = torch.bmm(part.b, part.b.mT) * part.find_same_ids()
            return products.sum((1, 2)).clamp(min=0)

        mapped = replace(self, b=b)
        pairs = self.ids.shape[1] ** 2
        return mapped.map_examples(square, pairs, _CURVATURE_ELEMENTS)

    def find_same_ids(self) -> Tensor:
        """Return which two positions of an example read the same row, `[N, T, T]`."""
        return self.ids.unsqueeze(2) == self.ids.unsqueeze(1)

    def sum_gradients(self) -> Tensor:
        """Return Σ_n g_n `[num_rows, d_out]` in float64."""
        zeros = self.b.new_zeros(self.num_rows, self.d_out, dtype=torch.float64)
        return self.add_sum(zeros)

    def add_sum(self, total: Tensor) -> Tensor:
        """Add Σ_n g_n to a float64 `[num_rows, d_out]` in place, and return it."""
        rows = self.b.double().flatten(0, 1)
        return total.index_add_(0, self.ids.flatten(), rows)

    def sum_squares(self) -> Tensor:
        """Return Σ_n g_n², entry by entry, `[num_rows, d_out]` in float64.

        Rows that an example reads twice add up before the square.
        """
        b = self.b.double().flatten(0, 1)
        total = b.new_zeros(self.num_rows, b.shape[1])
        examples = torch.arange(self.batch_size, device=self.ids.device)
        first_keys = examples.unsqueeze(1) * self.num_rows
        read_keys = (self.ids + first_keys).flatten()
        keys, inverse = torch.unique(read_keys, return_inverse=True)
        sums = b.new_zeros(len(keys), b.shape[1])
        sums.index_add_(0, inverse, b)
        return total.index_add_(0, keys % self.num_rows, sums.square())

    def inner_products(self, span: Span) -> Tensor:
        """Return Σ_t L_j[id_t] · b_t, `[N, k]` in float64, from the rows that were read."""
        vectors = span.vectors[""].to(self.b.dtype)
        _, positions, d = self.b.shape

        def multiply(part: Lookup) -> Tensor:
            gathered = vectors[:, part.ids]
            return torch.einsum("kntd,ntd->nk", gathered, part.b).double()

        k = span.rank
        return self.map_examples(multiply, k * positions * d, shape=(k,))

    def product_error(self, span: Span, norms: Tensor, gain: float) -> Tensor:
        """Return an upper bound `[N]` of the rounding of `inner_products`."""
        terms = count_moved(self.b).double()
        magnitudes = exact_row_norms(self.b).sum(1)
        length = terms * self.d_out
        rounding = torch.minimum(length, 4 * length.sqrt())
        units = rounding * span.length + 2 * terms * gain
        return roundoff(self.b) * units * magnitudes


@dataclass(frozen=True)
class PerExample(_Block):
    """Materialised per-example gradients of small or irregular parameters.

    Attributes:
        grads: role of the parameter in its module (for example `weight`) to
            `[N, *parameter.shape]`.
    """

    grads: NamedTensors
    kind: ClassVar[str] = "elementwise"

    @property
    def like(self) -> Tensor:
        """Return gradients with the coarsest type of all roles."""
        return max(self.grads.values(), key=roundoff)

    @property
    def batch_size(self) -> int:
        """Return the number of examples N."""
        return len(self.like)

    def _map_roles(self, function: Callable[[Tensor], _Result]) -> dict[str, _Result]:
        """Return role to the value of a function of the role's gradients."""
        return {role: function(g) for role, g in self.grads.items()}

    @property
    def side_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return role to the shape of the parameter."""
        return self._map_roles(lambda g: tuple(g.shape[1:]))

    @property
    def gradient_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return role to the shape of one example's gradient, the roles in order."""
        return dict(sorted(self.side_shapes.items()))

    def flatten(self) -> Tensor:
        """Return gradients `[N, numel]`, the roles of `gradient_shapes` side by side."""
        (flat,) = self.iterate_flat()
        return torch.cat([flat[role] for role in self.gradient_shapes], 1)

    @property
    def num_entries(self) -> int:
        """Return the entries of one example's gradient."""
        return sum(math.prod(shape) for shape in self.side_shapes.values())

    def select(self, rows: Rows) -> PerExample:
        """Return the block of the examples start … stop."""
        return PerExample(self._map_roles(lambda g: g[rows]))

    def merge_rows(self, count: int, size: int) -> PerExample:
        """Return the block of `count` examples, each the sum of `size` consecutive rows."""
        merged = self._map_roles(lambda g: g[: count * size])
        if size > 1:
            for role, g in merged.items():
                merged[role] = g.view(-1, size, *g.shape[1:]).sum(1)
        return PerExample(merged)

    def join(self, others: Sequence[Any]) -> PerExample:
        """Return several uses of one module as one block, with their gradients added."""
        total = {}
        for role in self.grads:
            uses = [block.grads[role] for block in (self, *others)]
            total[role] = torch.stack(uses).sum(0)
        return PerExample(total)

    def weighted_sum(self, weights: Tensor, excluded: Tensor | None = None) -> NamedTensors:
        """Return role to Σ_n weights_n g_n."""

        def add(g: Tensor) -> Tensor:
            w = weights.to(g.dtype)
            g = _mask(g, excluded)
            return torch.tensordot(w, g, dims=1)

        return self._map_roles(add)

    def squared_norms(self, entry: Entry | None) -> Tensor:
        """Return ‖z_n‖² in an entry of a metric, `[N]` in float64, up to rounding."""
        mapped = self.grads if entry is None else entry.apply_roles(self.grads)
        squares = [sum_squares(g.reshape(len(g), -1)) for g in mapped.values()]
        return torch.stack(squares).sum(0)

    def sum_gradients(self) -> NamedTensors:
        """Return role to Σ_n g_n in float64."""
        return self._map_roles(lambda g: g.detach().double().sum(0))

    def sum_squares(self) -> NamedTensors:
        """Return role to Σ_n g_n², entry by entry, in float64."""
        return self._map_roles(lambda g: g.detach().double().square().sum(0))

    def iterate_flat(self) -> Iterator[NamedTensors]:
        """Yield role to gradients `[N, numel]` once."""
        yield self._map_roles(lambda g: g.reshape(len(g), math.prod(g.shape[1:])))


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
    def batch_size(self) -> int:
        """Return the number of examples N."""
        return self.outer.batch_size

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

    def select(self, rows: Rows) -> Tied:
        """Return the block of the examples start … stop."""
        return Tied(self.lookup.select(rows), self.outer.select(rows))

    def merge_rows(self, count: int, size: int) -> Tied:
        """Return the block of `count` examples, each the sum of `size` consecutive rows."""
        return Tied(self.lookup.merge_rows(count, size), self.outer.merge_rows(count, size))

    def weighted_sum(self, weights: Tensor, excluded: Tensor | None = None) -> Tensor:
        """Return Σ_n weights_n g_n as `[V, d]`."""
        total = self.outer.weighted_sum(weights, excluded)
        return self.lookup.add_weighted_sum(total, weights, excluded)

    def _mapped_squares(self, sides: Kronecker) -> Tensor:
        """Return ‖z_n‖² of the sum of both uses: their squares, and twice their inner product."""
        if not isinstance(sides.output, Identity):
            raise ValueError("the output side of a tied embedding must be the identity")
        lookup, outer = self.lookup, self.outer
        squares = lookup._mapped_squares(Kronecker(sides.output, sides.input))
        positions = outer.a.shape[1]
        if positions == 0:
            return squares
        squares += outer._mapped_squares(sides)

        def multiply_uses(part: Tied) -> Tensor:
            a = sides.input.apply(part.outer.a).double()
            c = sides.input.apply(part.lookup.b).double()
            products = torch.bmm(a, c.mT) * part.read_outputs()
            return products.sum((1, 2))

        size = positions * max(1, lookup.ids.shape[1])
        inner_products = self.map_examples(multiply_uses, size, _CURVATURE_ELEMENTS)
        squares += 2 * sides.output.factor**2 * inner_products
        return squares.clamp(min=0)

    def read_outputs(self) -> Tensor:
        """Return the output gradients of the linear use at the ids read, `[N, T, S]`."""
        positions = self.outer.b.shape[1]
        ids = self.lookup.ids.unsqueeze(1).expand(-1, positions, -1)
        return self.outer.b.gather(2, ids)

    def sum_gradients(self) -> Tensor:
        """Return Σ_n g_n `[V, d]` in float64."""
        return self.lookup.add_sum(self.outer.sum_gradients()[0])

    def sum_squares(self) -> Tensor:
        """Return Σ_n g_n², entry by entry, `[V, d]` in float64."""
        total = self.like.new_zeros(self.d_out, self.d_in, dtype=torch.float64)
        for rows in _summed_chunks(self.batch_size, total.numel()):
            gradients = self.select(rows).double().per_example()
            total += gradients.square().sum(0)
        return total

    def double(self) -> Tied:
        """Return the block in float64."""
        lookup = replace(self.lookup, b=self.lookup.b.double())
        return Tied(lookup, self.outer.double())

    def count_terms(self) -> tuple[Tensor, Tensor]:
        """Return the sum of the magnitudes of all uses and the uses with a gradient, `[N]`."""
        lookups = exact_row_norms(self.lookup.b).sum(1)
        magnitudes = lookups + self.outer.exact_magnitudes()
        return magnitudes, self.count_uses().double()

    def count_uses(self) -> Tensor:
        """Return how many uses of each example have a gradient, `[N]`."""
        return count_moved(self.lookup.b) + count_moved(self.outer.b)


@dataclass(frozen=True)
class MaterializedGradients(_Block):
    """Materialised gradients of a matrix-shaped layer.

    Attributes:
        gradients: `[N * groups, d_out, d_in]`, the bias as last column. Those of an embedding are
            `[N, num_rows, d_out]`.
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
    def batch_size(self) -> int:
        """Return the number of examples N."""
        return self.gradients.shape[0] // self.groups

    @property
    def num_entries(self) -> int:
        """Return the entries of one example's gradient."""
        return self.groups * math.prod(self.gradients.shape[1:])

    def per_example(self) -> Tensor:
        """Return the gradients as they are."""
        return self.gradients

    def merge_rows(self, count: int, size: int) -> MaterializedGradients:
        """Return the block of `count` examples, each the sum of `size` consecutive rows."""
        g = self.gradients[: count * size * self.groups]
        if size > 1:
            records = g.view(count, size, self.groups, *g.shape[1:])
            g = records.sum(1).flatten(0, 1)
        return replace(self, gradients=g)

    def weighted_sum(self, weights: Tensor, excluded: Tensor | None = None) -> Tensor:
        """Return Σ_n weights_n g_n as `[groups * d_out, d_in]`."""
        g = _mask(self.gradients, excluded, self.groups)
        rows = g.reshape(len(weights), self.num_entries)
        total = weights.to(g.dtype) @ rows
        return total.view(-1, g.shape[-1])

    def iterate_flat(self) -> Iterator[NamedTensors]:
        """Yield the gradients `[N, numel]` once."""
        yield {"": self.gradients.reshape(self.batch_size, self.num_entries)}


# --------------------------------------------------------------------------------------------------
# Convolutions in the normal form: patches are rows of `a`, output positions are the shared axis.

_WEIGHT_GRADIENT = {1: conv1d_weight, 2: conv2d_weight, 3: conv3d_weight}
_FEW_COLUMNS = 32  # then a copy beats the convolution


@dataclass(frozen=True)
class ConvBlock(_Block):
    """A convolution's inputs and output gradients before any patch is formed.

    Attributes:
        x: inputs `[N * views, c_in, *spatial]`, already padded unless `padding` is non-zero.
        b: output gradients `[N * views, c_out, *positions]`.
        kernel, stride, padding, dilation: one integer per spatial axis.
        groups: groups of the convolution.
        weight, bias: whether each is trained.
        views: consecutive rows whose gradients add up to that of ONE example.
    """

    x: Tensor
    b: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
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
        return replace(self, x=self.x.shape, b=self.b.shape)  # type: ignore[arg-type]

    @property
    def positions(self) -> int:
        """Return the output positions T of one example, those of all its views."""
        return self.views * math.prod(self.b.shape[2:])

    @property
    def d_in(self) -> int:
        """Return the width of a patch row of one group, the homogeneous coordinate included."""
        channels = self.x.shape[1] // self.groups
        return self.weight * channels * math.prod(self.kernel) + self.bias

    @property
    def d_out(self) -> int:
        """Return the output channels of one group."""
        return self.b.shape[1] // self.groups

    @property
    def dimensions(self) -> tuple[int, int, int]:
        """Return positions T, input features d_in and output features d_out."""
        return self.positions, self.d_in, self.d_out

    @property
    def matrix(self) -> ConvBlock:
        """Return the block itself."""
        return self

    def merge_rows(self, count: int, size: int) -> ConvBlock:
        """Return the block of `count` examples, each the sum of `size` consecutive rows."""
        rows = self.select(slice(0, count * size))
        return replace(rows, views=self.views * size)

    def join(self, others: Sequence[Any]) -> ConvBlock | Outer:
        """Return several calls of one convolution as one block.

        The calls become views where their shapes agree. Otherwise their patches are formed.
        """
        return interleave_calls([self, *others]) or self.outer().join(others)

    def outer(self) -> Outer:
        """Return the explicit form: a `[N * groups, T, d_in]`, b `[N * groups, T, d_out]`."""
        b = self._output_rows()
        columns = []
        if self.weight:
            columns.append(self._patches())
        if self.bias:
            columns.append(b.new_ones(*b.shape[:2], 1))
        return Outer(_concatenate(columns), b, self.groups)

    def make_factor_block(self) -> Outer | Patched:
        """Return the block as factors are computed from it, with its patches not formed yet.

        It is explicit where the bias alone is trained, which reads no patch.
        """
        if not self.weight:
            return self.outer()
        b = self._output_rows()
        windows = self._windows()
        rows = windows.unflatten(0, (self.batch_size, self.views))
        return Patched(rows.unflatten(2, (self.groups, -1)), b, self.bias)

    def _output_rows(self) -> Tensor:
        """Return the output gradients as rows `[N * groups, T, d_out]`."""
        columns = self.b.reshape(len(self.b) * self.groups, self.d_out, -1)
        rows = columns.transpose(1, 2)
        return _merge_positions(rows, self.batch_size, self.views, self.groups)

    def _patches(self) -> Tensor:
        """Return patches `[N * groups, T, c_in / groups * prod(kernel)]`."""
        rows = self._columns().transpose(1, 2)
        return _merge_positions(rows, self.batch_size, self.views, self.groups)

    def _columns(self) -> Tensor:
        """Return patches as columns by a strided view and one copy.

        Their shape is `[N * views * groups, c_in / groups * prod(kernel), T / views]`.
        """
        windows = self._windows()
        positions = math.prod(self.b.shape[2:])
        return windows.reshape(len(windows) * self.groups, -1, positions)

    def _windows(self) -> Tensor:
        """Return a strided view of the padded input, `[N * views, c_in, *kernel, *positions]`."""
        pads = []
        for size in reversed(self.padding):
            pads += [size, size]
        x = F.pad(self.x, pads) if any(pads) else self.x.contiguous()
        shape = (*x.shape[:2], *self.kernel, *self.b.shape[2:])
        outer_strides, steps = x.stride()[:2], x.stride()[2:]
        kernel_strides = map(operator.mul, steps, self.dilation)
        position_strides = map(operator.mul, steps, self.stride)
        strides = (*outer_strides, *kernel_strides, *position_strides)
        return x.as_strided(shape, strides)

    def per_example(self) -> Tensor:
        """Return materialised gradients `[N * groups, d_out, d_in]` by one grouped convolution.

        Examples are its groups and views its batch. Where a gradient is smaller than what it is
        made of, each view has its own gradient and these are added, so that nothing is copied.
        """
        n = self.batch_size
        if self.views > 1 and self.num_entries <= self.x[0].numel() + self.b[0].numel():
            each = replace(self, views=1).per_example()
            views = MaterializedGradients(each, self.groups)
            return views.merge_rows(n, self.views).gradients
        parts = []
        if self.weight:
            parts.append(self._weight_gradients())
        if self.bias:
            sums = self.b.flatten(2).sum(-1)
            sums = sums.unflatten(0, (n, self.views)).sum(1)
            parts.append(sums.reshape(n * self.groups, self.d_out, 1))
        return _concatenate(parts)

    def _weight_gradients(self) -> Tensor:
        """Return materialised weight gradients `[N * groups, d_out, width]`."""
        if self.d_in <= _FEW_COLUMNS:
            columns = self._columns() if self.views == 1 else self._patches().transpose(1, 2)
            # The faster order of the two, above all with channels last.
            return torch.bmm(columns, self._output_rows()).transpose(1, 2)
        n = self.batch_size
        x = self._examples_as_channels(self.x)
        b = self._examples_as_channels(self.b)
        gradients = self._weight_gradient(x, b, n)
        return gradients.reshape(n * self.groups, self.d_out, -1)

    def _examples_as_channels(self, x: Tensor) -> Tensor:
        """Return `[views, N * c, *spatial]` from `[N * views, c, *spatial]`."""
        by_view = x.unflatten(0, (self.batch_size, self.views)).transpose(0, 1)
        return by_view.flatten(1, 2)

    def weighted_sum(self, weights: Tensor, excluded: Tensor | None = None) -> Tensor:
        """Return Σ_n weights_n g_n as `[c_out, d_in]`, without forming any g_n."""
        b = _weigh(self.b, weights, excluded, self.views)
        parts = []
        if self.weight:
            x = _mask(self.x, excluded, self.views)
            parts.append(self._weight_gradient(x, b, 1).flatten(1))
        if self.bias:
            parts.append(b.flatten(2).sum((0, 2)).unsqueeze(-1))
        return _concatenate(parts)

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

    def magnitudes(self) -> tuple[Tensor, Tensor]:
        """Return upper bounds of Σ_t ‖a_t‖ ‖b_t‖ and the positions with a gradient, `[N]`.

        The bound is √(Σ‖a_t‖²) √(Σ‖b_t‖²), by Cauchy–Schwarz.
        """
        positions = self.count_positions()
        by_view = (self.batch_size, self.views)
        inputs = row_norms(_rows_in_memory_order(self.x))
        inputs = limit_inputs(inputs, self.x).view(by_view)
        inputs = torch.linalg.vector_norm(inputs, dim=1)
        outputs = row_norms(_rows_in_memory_order(self.b))
        outputs = torch.linalg.vector_norm(outputs.view(by_view), dim=1)
        squares = inputs.square() * math.prod(self.kernel) * self.weight
        if self.bias:
            squares += positions
        return squares.sqrt() * outputs, positions

    count_terms = magnitudes

    def count_positions(self) -> Tensor:
        """Return how many output positions of each example have a gradient, `[N]`."""
        if _is_channels_last(self.b):
            # Reductions over a short last axis are slow. A sum of |b| is 0 where all of b is.
            rows = self.b.movedim(1, -1).flatten(0, -2).abs()
            ones = rows.new_ones(rows.shape[1])
            sizes = torch.mv(rows, ones).view(len(self.b), -1)
        else:
            # Three times as fast as any(), and NaN is not zero.
            sizes = self.b.abs().amax(1).flatten(1)
        return _sum_groups((sizes != 0).sum(1), self.views)


Block = Outer | Patched | Lookup | PerExample | Tied
"""What curvature reads."""
AnyBlock = Outer | Lookup | PerExample | Tied | ConvBlock | MaterializedGradients
"""What clipping reads."""


def _summed_chunks(count: int, size: int) -> Iterator[slice]:
    """Yield the examples whose gradients of `size` entries are formed and added at once."""
    yield from chunks(count, size, _CURVATURE_ELEMENTS + size - 1)


def _merge_positions(x: Tensor, count: int, size: int, groups: int) -> Tensor:
    """Return `[count * groups, size * T, d]` from `[N * groups, T, d]`."""
    _, positions, d = x.shape
    rows = x[: count * size * groups]
    split = rows.reshape(count, size, groups, positions, d)
    return split.transpose(1, 2).reshape(count * groups, size * positions, d)


def _concatenate(parts: list[Tensor]) -> Tensor:
    """Return tensors side by side; a single one is not copied."""
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def _append_ones(rows: Tensor) -> Tensor:
    """Return `[..., d + 1]` from `[..., d]`, the homogeneous coordinate last."""
    return torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], -1)


def _is_channels_last(x: Tensor) -> bool:
    return not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def _rows_in_memory_order(x: Tensor) -> Tensor:
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
            gradients = [x.per_example() for x in blocks]  # type: ignore[union-attr]
            return replace(block, gradients=torch.stack(gradients).sum(0))
    first: Any = blocks[0]
    joined: AnyBlock = first.join(blocks[1:])
    return joined


def interleave_calls(blocks: Sequence[Any]) -> ConvBlock | None:
    """Return several calls of one convolution as one block, or None where their shapes differ.

    The calls become views of the block.
    """
    first = blocks[0]
    by_view = (first.batch_size, first.views)
    inputs = []
    outputs = []
    for block in blocks:
        if block.settings != first.settings:
            return None
        inputs.append(block.x.unflatten(0, by_view))
        outputs.append(block.b.unflatten(0, by_view))
    x = torch.cat(inputs, 1).flatten(0, 1)
    b = torch.cat(outputs, 1).flatten(0, 1)
    views = first.views * len(blocks)
    return replace(first, x=x, b=b, views=views)


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
