"""Normal forms: what one layer contributes to the per-example gradients of a batch.

Every covered layer is reduced to one of four values, so that norms, clipped sums and curvature factors are written
once (a convolution to a fifth for whoever looks at curvature: the first, before its patches are formed). With inputs
`a_t` and output gradients `b_t` at position t the gradient of example n is `g_n = Σ_t b_nt a_ntᵀ`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight


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


# --------------------------------------------------------------------------------------------------
# Questions about values, asked of a card all at once: the host waits for it once a micro-batch
# instead of once a layer.

_ASKED: ContextVar[list[Tensor] | None] = ContextVar("asked", default=None)


def is_waited_for(x: Tensor) -> bool:
    """Whether reading a number of x makes the host wait for a device that it otherwise runs ahead of."""
    return x.device.type != "cpu"


def any_of(flags: Tensor) -> bool:
    """Whether any of them is set; inside `put_off`, and not on the host, it answers no and leaves the question open."""
    asked = _ASKED.get()
    if asked is None or not is_waited_for(flags):
        return bool(flags.any())
    asked.append(flags.any())
    return False


@contextmanager
def put_off() -> Iterator[list[Tensor]]:
    """The questions that `any_of` leaves open in here, each one flag `[]`; what was computed holds where all answers are no."""
    asked: list[Tensor] = []
    token = _ASKED.set(asked)
    try:
        yield asked
    finally:
        _ASKED.reset(token)


def answered(questions: Sequence[Tensor]) -> list[bool]:
    """The answers, fetched in one transfer."""
    return [bool(x) for x in torch.stack([*questions]).tolist()] if questions else []


# --------------------------------------------------------------------------------------------------
# Norms of rows that round up: what every bound of an example's gradient is made of.

TINY = 2.0**-80  # squared norms below it may have lost terms that are too small for float32
_SHORT = 4096  # entries of a row whose squares may be summed in its own precision
_REACH = 2.0**100


def lengths(x: Tensor) -> Tensor:
    """Upper bounds of the norms over the last axis, in float64; each row's is its own.

    The sum of d squares in float32 is off by at most a share (d + 2) u, percents over millions of entries: long rows are cut
    into short ones, whose sums are added in float64. Rows whose squares leave the range of float32 are taken again; on a card,
    whose values the host does not wait for, they are bounded by √d times their largest entry.
    """
    d, info = x.shape[-1], torch.finfo(x.dtype)
    if x.dtype != torch.float32:
        return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    if d > _SHORT:
        return torch.linalg.vector_norm(torch.stack([lengths(part) for part in x.split(_SHORT, -1)], -1), dim=-1)
    square = torch.linalg.vector_norm(x, dim=-1).double().square()
    found = (square * (1 + (d + 2) * info.eps)).sqrt()
    again = ~((square >= TINY) & (square < math.inf))
    if d and is_waited_for(x):
        return torch.where(again, torch.linalg.vector_norm(x, math.inf, dim=-1).double() * math.sqrt(d), found)
    if bool(again.any()):
        found[again] = torch.linalg.vector_norm(x[again], dim=-1, dtype=torch.float64)
    return found


def within_reach(lengths: Tensor, inputs: Tensor) -> Tensor:
    """Lengths of a layer's inputs, infinite beyond 2¹⁰⁰ in float32, so that such an example counts nothing.

    In the sum its output gradients times its clip factor would be below the least normal number, and their rounding, times
    such inputs, more than the clip allows.
    """
    return lengths.masked_fill(lengths > _REACH, math.inf) if inputs.dtype == torch.float32 else lengths


# --------------------------------------------------------------------------------------------------
# Convolutions in the normal form: patches are rows of `a`, output positions are the shared axis.

_WEIGHT_GRADIENT = {1: conv1d_weight, 2: conv2d_weight, 3: conv3d_weight}


@dataclass(frozen=True)
class ConvBlock:
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
        """Number of examples N."""
        return self.x.shape[0] // self.views

    @property
    def positions(self) -> int:
        """Output positions T of one example, those of all its views."""
        return self.views * math.prod(self.b.shape[2:])

    def examples(self, chosen: slice) -> ConvBlock:
        """The block of some of the examples."""
        rows = slice(chosen.start * self.views, chosen.stop * self.views)
        return replace(self, x=self.x[rows], b=self.b[rows])

    @property
    def d_in(self) -> int:
        """Width of a patch row of one group, the homogeneous coordinate included."""
        return self.weight * (self.x.shape[1] // self.groups) * math.prod(self.kernel) + self.bias

    @property
    def d_out(self) -> int:
        """Output channels of one group."""
        return self.b.shape[1] // self.groups

    def outer(self) -> Outer:
        """The explicit normal form: a `[N * groups, T, d_in]`, b `[N * groups, T, d_out]`."""
        b = self._joined(self.b.reshape(len(self.b) * self.groups, self.d_out, -1).transpose(1, 2))
        columns = []
        if self.weight:
            columns.append(self._patches())
        if self.bias:
            columns.append(b.new_ones(*b.shape[:2], 1))
        return Outer(columns[0] if len(columns) == 1 else torch.cat(columns, -1), b, self.groups)

    def patched(self) -> Outer | Patched:
        """The normal form before patches are formed; explicit where the bias alone is trained, which reads none."""
        if not self.weight:
            return self.outer()
        b = self._joined(self.b.reshape(len(self.b) * self.groups, self.d_out, -1).transpose(1, 2))
        view = self._windows()
        view = view.view(self.batch_size, self.views, self.groups, -1, *view.shape[2:])
        return Patched(view, b, self.bias)

    def _joined(self, rows: Tensor) -> Tensor:
        """`[N * views * groups, T / views, d]` to `[N * groups, T, d]`: the positions of the views one after the other."""
        if self.views == 1:
            return rows
        split = rows.reshape(-1, self.views, self.groups, *rows.shape[1:]).transpose(1, 2)
        return split.reshape(self.batch_size * self.groups, -1, rows.shape[2])

    def _patches(self) -> Tensor:
        """Patches `[N * groups, T, c_in / groups * prod(kernel)]`."""
        return self._joined(self._columns().transpose(1, 2))

    def _columns(self) -> Tensor:
        """Patches as columns `[N * views * groups, c_in / groups * prod(kernel), T / views]` by a strided view and one copy."""
        windows = self._windows()
        return windows.reshape(len(windows) * self.groups, -1, math.prod(self.b.shape[2:]))

    def _windows(self) -> Tensor:
        """Patches `[N * views, c_in, *kernel, *positions]` as a strided view of the padded input."""
        pads = [p for size in reversed(self.padding) for p in (size, size)]
        x = F.pad(self.x, pads) if any(pads) else self.x.contiguous()
        steps = x.stride()[2:]
        shape = (*x.shape[:2], *self.kernel, *self.b.shape[2:])
        strides = (
            *x.stride()[:2],
            *(s * d for s, d in zip(steps, self.dilation, strict=True)),
            *(s * d for s, d in zip(steps, self.stride, strict=True)),
        )
        return x.as_strided(shape, strides)

    def per_example(self) -> Tensor:
        """Materialised gradients `[N * groups, d_out, d_in]` by one grouped convolution: examples as groups, views as batch.

        Where a gradient is smaller than what it is made of, each view has its own, and they are added: nothing is laid out anew.
        """
        if self.views > 1 and self.d_in * self.d_out * self.groups <= (self.x[0].numel() + self.b[0].numel()):
            each = replace(self, views=1).per_example()
            return each.view(self.batch_size, self.views, self.groups, *each.shape[1:]).sum(1).flatten(0, 1)
        n = self.batch_size
        parts = []
        if self.weight:
            if self.d_in <= _FEW_COLUMNS:
                b = self._joined(self.b.reshape(len(self.b) * self.groups, self.d_out, -1).transpose(1, 2))
                columns = self._columns() if self.views == 1 else self._patches().transpose(1, 2)
                parts.append(torch.bmm(columns, b).transpose(1, 2))  # the faster order, with channels last above all
            else:
                gradient = self._weight_gradient(self._side_by_side(self.x), self._side_by_side(self.b), n)
                parts.append(gradient.reshape(n * self.groups, self.d_out, -1))
        if self.bias:
            sums = self.b.flatten(2).sum(-1).view(n, self.views, self.b.shape[1]).sum(1)
            parts.append(sums.reshape(n * self.groups, self.d_out, 1))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def _side_by_side(self, x: Tensor) -> Tensor:
        """`[N * views, c, *spatial]` to `[views, N * c, *spatial]`."""
        split = x.reshape(self.batch_size, self.views, *x.shape[1:]).transpose(0, 1)
        return split.reshape(self.views, -1, *x.shape[2:])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ_n weights_n g_n as `[c_out, d_in]` for weights `[N]`, without forming any g_n."""
        weights = weights if self.views == 1 else weights.repeat_interleave(self.views)
        b = self.b * weights.view(-1, *[1] * (self.b.dim() - 1))
        parts = []
        if self.weight:
            parts.append(self._weight_gradient(self.x, b, 1).flatten(1))
        if self.bias:
            parts.append(b.flatten(2).sum((0, 2)).unsqueeze(-1))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def _weight_gradient(self, x: Tensor, b: Tensor, copies: int) -> Tensor:
        """Weight gradient `[copies * c_out, c_in / groups, *kernel]` of a convolution with `copies` times the groups."""
        shape = (copies * self.b.shape[1], self.x.shape[1] // self.groups, *self.kernel)
        backward = _WEIGHT_GRADIENT[len(self.kernel)]
        return backward(x, shape, b, self.stride, self.padding, self.dilation, self.groups * copies)

    def magnitudes(self, positions: Tensor | None = None) -> Tensor:
        """An upper bound `[N]` of Σ_t ‖a_t‖ ‖b_t‖ by Cauchy–Schwarz: √(Σ‖a_t‖²) √(Σ‖b_t‖²); `own_positions` where at hand."""
        size = self.batch_size, self.views
        x, b = (lengths(_as_stored(side)) for side in (self.x, self.b))
        x, b = (torch.linalg.vector_norm(side.view(size), dim=1) for side in (within_reach(x, self.x), b))
        ones = (self.own_positions() if positions is None else positions) if self.bias else 0.0
        return (x.square() * math.prod(self.kernel) * self.weight + ones).sqrt() * b

    def own_positions(self) -> Tensor:
        """Output positions of each example, all its views together, that have a gradient `[N]`."""
        if _is_channels_last(self.b):  # reductions over a short last axis are slow; sums of |b| are zero where all of b is
            rows = self.b.movedim(1, -1).flatten(0, -2).abs()
            moved = (torch.mv(rows, rows.new_ones(rows.shape[1])) != 0).view(len(self.b), -1)
        else:
            moved = self.b.abs().amax(1) != 0  # three times as fast as any(), and NaN is not zero
        return moved.flatten(1).sum(1).view(self.batch_size, self.views).sum(1)


AnyBlock = Outer | Lookup | PerExample | Tied | ConvBlock | Formed


def _is_channels_last(x: Tensor) -> bool:
    return not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def _as_stored(x: Tensor) -> Tensor:
    """`[N, c, *spatial]` as rows `[N, c * prod(spatial)]`, in the order of the memory: a view for either order of channels."""
    return (x.movedim(1, -1) if _is_channels_last(x) else x).flatten(1)


_FEW_COLUMNS = 32  # below this many columns a strided copy and a batched product beat the grouped convolution


def interleaved(blocks: Sequence[ConvBlock]) -> ConvBlock | None:
    """Several calls of one convolution as one block whose views are the calls, or None where their shapes differ."""
    first = blocks[0]
    for other in blocks[1:]:
        if _settings(other) != _settings(first):
            return None

    def merged(parts: list[Tensor]) -> Tensor:
        n, views = first.batch_size, first.views
        split = [part.reshape(n, views, *part.shape[1:]) for part in parts]
        return torch.cat(split, 1).flatten(0, 1)

    x, b = merged([block.x for block in blocks]), merged([block.b for block in blocks])
    return replace(first, x=x, b=b, views=first.views * len(blocks))


def _settings(block: ConvBlock) -> tuple[object, ...]:
    rest = block.kernel, block.stride, block.padding, block.dilation, block.groups, block.weight, block.bias, block.views
    return block.x.shape, block.b.shape, *rest


def conv_block(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor, b: Tensor) -> ConvBlock:
    """The block of one call of a convolution module.

    Args:
        module: the convolution.
        x: its input `[N, c_in, *spatial]`.
        b: gradient of the summed losses with respect to its output `[N, c_out, *positions]`.
    """
    padding: tuple[int, ...]
    if module.padding_mode != "zeros":
        x = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
        padding = (0,) * len(module.kernel_size)
    elif isinstance(module.padding, str):
        x = F.pad(x, module._reversed_padding_repeated_twice)
        padding = (0,) * len(module.kernel_size)
    else:
        padding = tuple(module.padding)
    return ConvBlock(
        x=x,
        b=b,
        kernel=tuple(module.kernel_size),
        stride=tuple(module.stride),
        padding=padding,
        dilation=tuple(module.dilation),
        groups=module.groups,
        weight=module.weight.requires_grad,
        bias=module.bias is not None and module.bias.requires_grad,
    )


# --------------------------------------------------------------------------------------------------
# Weighted sums of per-example gradients: the second half of clipping, without forming a gradient
# again.


def weighted_sum(block: AnyBlock, weights: Tensor, broken: Tensor | None = None) -> Tensor | dict[str, Tensor]:
    """Σ_n weights_n g_n of one layer.

    Args:
        block: the layer's contribution.
        weights: `[N]`.
        broken: mask `[N]` of examples whose gradient is not finite, or None; their rows are zeroed first, since 0 · NaN
            is NaN.

    Returns:
        A matrix `[groups * d_out, d_in]` (an embedding: `[num_rows, d_out]`), or role to tensor for materialised blocks.
    """
    match block:
        case PerExample():
            return {
                role: torch.tensordot(weights.to(g.dtype), _without(g, broken), dims=1)
                for role, g in block.grads.items()
            }
        case Formed():
            g = _without(block.gradients, broken, block.groups)
            flat = weights.to(g.dtype) @ g.reshape(weights.shape[0], -1)
            return flat.view(-1, g.shape[-1])
        case Lookup():
            rows = _without(block.b, broken) * weights.to(block.b.dtype).view(-1, 1, 1)
            total = rows.new_zeros(block.num_rows, rows.shape[-1])
            return total.index_add_(0, block.ids.flatten(), rows.flatten(0, 1))
        case Tied():
            total = _outer_sum(block.outer, weights.to(block.outer.b.dtype), broken)
            rows = _without(block.lookup.b, broken) * weights.to(block.lookup.b.dtype).view(-1, 1, 1)
            return total.index_add_(0, block.lookup.ids.flatten(), rows.flatten(0, 1))
        case ConvBlock():
            x, b = (_without(side, broken, block.views) for side in (block.x, block.b))
            clean = replace(block, x=x, b=b)
            return clean.weighted_sum(weights.to(block.b.dtype))
        case Outer():
            return _outer_sum(block, weights.to(block.b.dtype), broken)


def _outer_sum(block: Outer, weights: Tensor, broken: Tensor | None) -> Tensor:
    a, b = _without(block.a, broken, block.groups), _without(block.b, broken, block.groups)
    n, g = weights.shape[0], block.groups
    if g == 1:
        scaled = (b * weights.view(-1, 1, 1)).flatten(0, 1)
        total = scaled.T @ a.flatten(0, 1)
        return torch.cat([total, scaled.sum(0).unsqueeze(1)], 1) if block.homogeneous else total
    scaled = b * weights.repeat_interleave(g).view(-1, 1, 1)
    pair = (scaled.view(n, g, *scaled.shape[1:]), a.view(n, g, *a.shape[1:]))
    return torch.einsum("ngto,ngti->goi", *pair).flatten(0, 1)


def _without(x: Tensor, broken: Tensor | None, each: int = 1) -> Tensor:
    """x with the rows of broken examples set to zero, `each` rows an example."""
    if broken is None:
        return x
    rows = broken if each == 1 else broken.repeat_interleave(each)
    return x.masked_fill(rows.view(-1, *[1] * (x.dim() - 1)), 0)
