"""Convolutions in the normal form: patches are rows of `a`, output positions are the shared axis."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from dpkfc.blocks import Outer

__all__ = ["ConvBlock", "conv_block"]

_WEIGHT_GRADIENT = {1: conv1d_weight, 2: conv2d_weight, 3: conv3d_weight}


@dataclass(frozen=True)
class ConvBlock:
    """A convolution's inputs and output gradients before any patch is formed.

    Attributes:
        x: inputs `[N, c_in, *spatial]`, already padded unless `padding` is non-zero.
        b: output gradients `[N, c_out, *positions]`.
        kernel, stride, padding, dilation: one integer per spatial axis.
        groups: groups of the convolution.
        weight, bias: whether each is trained.
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

    @property
    def batch_size(self) -> int:
        """Number of examples N."""
        return self.x.shape[0]

    @property
    def positions(self) -> int:
        """Output positions T of one example."""
        return math.prod(self.b.shape[2:])

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
        n, t = self.batch_size, self.positions
        b = self.b.reshape(n * self.groups, self.d_out, t).transpose(1, 2)
        columns = []
        if self.weight:
            columns.append(self._patches())
        if self.bias:
            columns.append(b.new_ones(n * self.groups, t, 1))
        return Outer(torch.cat(columns, -1), b, self.groups)

    def _patches(self) -> Tensor:
        """Patches `[N * groups, T, c_in / groups * prod(kernel)]` by a strided view and one copy."""
        pads = [p for size in reversed(self.padding) for p in (size, size)]
        x = F.pad(self.x, pads) if any(pads) else self.x.contiguous()
        steps = x.stride()[2:]
        shape = (*x.shape[:2], *self.kernel, *self.b.shape[2:])
        strides = (
            *x.stride()[:2],
            *(s * d for s, d in zip(steps, self.dilation, strict=True)),
            *(s * d for s, d in zip(steps, self.stride, strict=True)),
        )
        columns = x.as_strided(shape, strides).reshape(self.batch_size * self.groups, -1, self.positions)
        return columns.transpose(1, 2)

    def per_example(self) -> Tensor:
        """Materialised gradients `[N * groups, d_out, d_in]` by one grouped convolution over all examples."""
        n = self.batch_size
        parts = []
        if self.weight:
            if self.d_in <= _FEW_COLUMNS:
                b = self.b.reshape(n * self.groups, self.d_out, self.positions)
                parts.append(torch.bmm(b, self._patches()))
            else:
                x = self.x.reshape(1, n * self.x.shape[1], *self.x.shape[2:])
                b = self.b.reshape(1, n * self.b.shape[1], *self.b.shape[2:])
                parts.append(self._weight_gradient(x, b, n).reshape(n * self.groups, self.d_out, -1))
        if self.bias:
            parts.append(self.b.flatten(2).sum(-1).reshape(n * self.groups, self.d_out, 1))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ_n weights_n g_n as `[c_out, d_in]` for weights `[N]`, without forming any g_n."""
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

    def magnitudes(self) -> Tensor:
        """An upper bound `[N]` of Σ_t ‖a_t‖ ‖b_t‖ by Cauchy–Schwarz: √(Σ‖a_t‖²) √(Σ‖b_t‖²)."""
        x = torch.linalg.vector_norm(self.x.flatten(1), dim=1, dtype=torch.float64)
        b = torch.linalg.vector_norm(self.b.flatten(1), dim=1, dtype=torch.float64)
        return (x.square() * math.prod(self.kernel) * self.weight + self.positions * self.bias).sqrt() * b


_FEW_COLUMNS = 32  # below this many columns a strided copy and a batched product beat the grouped convolution


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
