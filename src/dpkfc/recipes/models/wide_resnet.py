"""Wide residual networks for private training from scratch (De et al. 2022; Zagoruyko and Komodakis 2016)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

__all__ = ["WeightStandardisation", "WideResNet", "standardised_conv", "wide_resnet"]

_GROUPS = 16
_STEM = 16


class WeightStandardisation(nn.Module):
    """A parametrization: every filter with mean zero and a norm that one gain an output channel decides.

    `Ŵ = gain ⊙ (W - mean(W)) / √max(var(W) · fan_in, 1e-4)`, mean and (population) variance over one filter, so that `Ŵ` has
    variance `gain² / fan_in` (De et al. 2022). Nothing here depends on an example.

    Args:
        channels: output channels c_out; W is `[c_out, c_in / groups, *kernel]`.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels))

    def forward(self, weight: Tensor) -> Tensor:
        """The standardised weight, of the same shape."""
        filters = weight.flatten(1)
        centred = filters - filters.mean(1, keepdim=True)
        scale = (centred.square().mean(1) * filters.shape[1]).clamp(min=1e-4).rsqrt()
        return (centred * (self.gain * scale).unsqueeze(1)).view_as(weight)


def standardised_conv(channels_in: int, channels_out: int, kernel_size: int, stride: int = 1) -> nn.Module:
    """A convolution with a standardised weight, padded to keep the size at stride 1; its bias starts at zero."""
    conv = nn.Conv2d(channels_in, channels_out, kernel_size, stride, padding=kernel_size // 2)
    nn.init.normal_(conv.weight, std=1 / math.sqrt(conv.weight[0].numel()))
    nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
    return parametrize.register_parametrization(conv, "weight", WeightStandardisation(channels_out))


def _stage(channels_in: int, channels_out: int, kernel_size: int, stride: int = 1) -> nn.Sequential:
    """Activation, normalisation, convolution: in this order, the norm after the activation."""
    norm = nn.GroupNorm(_GROUPS, channels_in)
    return nn.Sequential(nn.ReLU(), norm, standardised_conv(channels_in, channels_out, kernel_size, stride))


class _Block(nn.Module):
    """Two stages and a skip, which has a stage of its own (1×1) where the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _stage(channels_in, channels_out, 3, stride), _stage(channels_out, channels_out, 3)
        )
        same = channels_in == channels_out and stride == 1
        self.skip: nn.Module = nn.Identity() if same else _stage(channels_in, channels_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x) + self.skip(x)


class WideResNet(nn.Module):
    """A pre-activation wide residual network without BatchNorm.

    Input `[N, 3, H, W]` with H and W divisible by 4, output `[N, num_classes]`.

    Args:
        depth: layers 6 n + 4, n blocks in each of three groups.
        width: channels 16 · width, 32 · width and 64 · width.
        num_classes: outputs.

    Raises:
        ValueError: a depth that is not 6 n + 4, or a width below 1.
    """

    def __init__(self, depth: int = 16, width: int = 4, num_classes: int = 10) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth must be 6 n + 4 (10, 16, 22, 28, 40, ...), got {depth}")
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        blocks, channels = list[nn.Module](), _STEM
        for stride, wide in ((1, 16 * width), (2, 32 * width), (2, 64 * width)):
            for i in range((depth - 4) // 6):
                blocks.append(_Block(channels, wide, stride if i == 0 else 1))
                channels = wide
        self.stem = standardised_conv(3, _STEM, 3)
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(nn.ReLU(), nn.GroupNorm(_GROUPS, channels))
        self.head = nn.Linear(channels, num_classes)
        nn.init.normal_(self.head.weight, std=1 / math.sqrt(channels))
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        return self.head(self.last(self.blocks(self.stem(x))).mean((2, 3)))


def wide_resnet(num_classes: int = 10) -> WideResNet:
    """WRN-16-4, the network of De et al. (2022) for CIFAR."""
    return WideResNet(16, 4, num_classes)
