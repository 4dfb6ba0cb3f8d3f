"""Convolutions in the normal form: patches are rows of `a`, output positions are the shared axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from dpkfc.blocks import Formed, Lookup, Outer, Patched, PerExample, Tied
from dpkfc.gradients.lengths import lengths, within_reach

__all__ = ["AnyBlock", "ConvBlock", "conv_block", "interleaved"]

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
