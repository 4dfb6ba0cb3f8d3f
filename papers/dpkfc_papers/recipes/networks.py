"""Networks of the papers: one of two hidden layers, residual ones, small vision transformers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize


def mnist_mlp(num_classes: int = 10) -> nn.Sequential:
    """Build two hidden layers of 256 (784-256-256-10), 269,322 parameters.

    Input `[N, 1, 28, 28]`, output `[N, num_classes]`.
    """
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, num_classes),
    )


# --------------------------------------------------------------------------------------------------
# Wide residual networks for private training from scratch (De et al. 2022; Zagoruyko and Komodakis
# 2016).

_GROUPS = 16
# Stride and width of the three groups of blocks of a residual network.
_STAGES = ((1, 16), (2, 32), (2, 64))


class WeightStandardisation(nn.Module):
    """A parametrization that gives every filter mean zero and a norm set by one gain a channel.

    `Ŵ = gain ⊙ (W - mean(W)) / √max(var(W) · fan_in, 1e-4)`, with mean and population variance over
    one filter, so that `Ŵ` has variance `gain² / fan_in` (De et al. 2022). It depends on no
    example.

    Args:
        channels: output channels c_out; W is `[c_out, c_in / groups, *kernel]`.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the standardised weight, of the same shape."""
        filters = weight.flatten(1)
        fan_in = filters.shape[1]
        mean = filters.mean(1, keepdim=True)
        centred = filters - mean
        variance = centred.square().mean(1)
        total = variance * fan_in
        gain = self.gain * total.clamp(min=1e-4).rsqrt()
        filters = centred * gain.unsqueeze(1)
        return filters.view_as(weight)


def standardised_conv(
    channels_in: int, channels_out: int, kernel_size: int, stride: int = 1
) -> nn.Module:
    """Build a convolution with a standardised weight and a bias that starts at zero.

    It is padded to keep the size at stride 1.
    """
    padding = kernel_size // 2
    conv = nn.Conv2d(channels_in, channels_out, kernel_size, stride, padding)
    fan_in = conv.weight[0].numel()
    deviation = 1 / math.sqrt(fan_in)
    nn.init.normal_(conv.weight, std=deviation)
    nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
    standardisation = WeightStandardisation(channels_out)
    return parametrize.register_parametrization(conv, "weight", standardisation)


def _wide_stage(
    channels_in: int, channels_out: int, kernel_size: int, stride: int = 1
) -> nn.Sequential:
    """Build activation, normalisation and convolution, in this order."""
    return nn.Sequential(
        nn.ReLU(),
        nn.GroupNorm(_GROUPS, channels_in),
        standardised_conv(channels_in, channels_out, kernel_size, stride),
    )


class _WideBlock(nn.Module):
    """Two stages and a skip, which has its own stage (1×1) where the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _wide_stage(channels_in, channels_out, 3, stride),
            _wide_stage(channels_out, channels_out, 3),
        )
        self.skip: nn.Module = nn.Identity()
        if channels_in != channels_out or stride != 1:
            self.skip = _wide_stage(channels_in, channels_out, 1, stride)

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
        blocks: list[nn.Module] = []
        channels = 16
        for stride, factor in _STAGES:
            wide = factor * width
            blocks.append(_WideBlock(channels, wide, stride))
            channels = wide
            # Of the n blocks of a group the first is built.
            for _ in range(depth // 6 - 1):
                blocks.append(_WideBlock(wide, wide, 1))
        self.stem = standardised_conv(3, 16, 3)
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(
            nn.ReLU(),
            nn.GroupNorm(_GROUPS, channels),
        )
        self.head = nn.Linear(channels, num_classes)
        deviation = 1 / math.sqrt(channels)
        nn.init.normal_(self.head.weight, std=deviation)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of images."""
        x = self.stem(x)
        x = self.blocks(x)
        features = self.last(x).mean((2, 3))
        return self.head(features)


def wide_resnet(num_classes: int = 10) -> WideResNet:
    """Build WRN-16-4, the network of De et al. (2022) for CIFAR."""
    return WideResNet(16, 4, num_classes)


# --------------------------------------------------------------------------------------------------
# ResNet-20 for 32×32 colour images with GroupNorm (He et al. 2016; Wu and He 2018).

_RESNET_GROUPS = 8


def _conv(channels_in: int, channels_out: int, stride: int = 1) -> nn.Conv2d:
    """Build a 3×3 convolution without bias."""
    return nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)


class _ResidualBlock(nn.Module):
    """Two 3×3 convolutions and a skip.

    Where the shape changes the skip takes every second pixel and pads channels with zeros.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.first = _conv(channels_in, channels_out, stride)
        self.first_norm = nn.GroupNorm(_RESNET_GROUPS, channels_out)
        self.second = _conv(channels_out, channels_out)
        self.second_norm = nn.GroupNorm(_RESNET_GROUPS, channels_out)
        self.stride = stride
        self.added = channels_out - channels_in

    def forward(self, x: Tensor) -> Tensor:
        pixels = x[:, :, :: self.stride, :: self.stride]
        padding = (0, 0, 0, 0, 0, self.added)
        skip = F.pad(pixels, padding)
        x = self.first(x)
        x = self.first_norm(x)
        x = self.second(F.relu(x))
        x = self.second_norm(x)
        return F.relu(x + skip)


def resnet20(num_classes: int = 10) -> nn.Sequential:
    """Build nineteen convolutions with GroupNorm in place of BatchNorm, and one linear layer.

    It has 269,722 parameters for ten classes, and shortcuts without parameters (option A of He et
    al. 2016). Input `[N, 3, 32, 32]`, output `[N, num_classes]`.
    """
    blocks: list[nn.Module] = []
    channels = 16
    for stride, wide in _STAGES:
        blocks += [
            _ResidualBlock(channels, wide, stride),
            _ResidualBlock(wide, wide, 1),
            _ResidualBlock(wide, wide, 1),
        ]
        channels = wide
    return nn.Sequential(
        _conv(3, 16),
        nn.GroupNorm(_RESNET_GROUPS, 16),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )


# --------------------------------------------------------------------------------------------------
# A small vision transformer. Every map is its own linear layer, so that each has its Kronecker
# factors.


class TransformerBlock(nn.Module):
    """Pre-norm attention and a two-layer map: six linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.map_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return states `[N, T, width]` of states of the same shape."""
        normed = self.attention_norm(x)
        query = self.query(normed)
        key = self.key(normed)
        value = self.value(normed)
        mixed = F.scaled_dot_product_attention(
            self._split(query),
            self._split(key),
            self._split(value),
        )
        merged = mixed.transpose(1, 2).flatten(2)
        x = x + self.out(merged)
        normed = self.map_norm(x)
        hidden = F.gelu(self.wide(normed))
        return x + self.narrow(hidden)

    def _split(self, x: Tensor) -> Tensor:
        """Map `[N, T, width]` to `[N, heads, T, width / heads]`."""
        by_head = x.unflatten(-1, (self.heads, -1))
        return by_head.transpose(1, 2)


class VisionTransformer(nn.Module):
    """Patches, learned positions, blocks, the mean over positions, a linear head.

    Args:
        image: channels and side of a square image.
        patch: side of a patch; divides the side of the image.
        width: of the vectors.
        depth: blocks.
        heads: of the attention; divides the width.
        num_classes: outputs.
    """

    def __init__(
        self,
        image: tuple[int, int],
        *,
        patch: int,
        width: int,
        depth: int,
        heads: int = 4,
        num_classes: int = 10,
    ) -> None:
        super().__init__()
        channels, side = image
        self.patch = patch
        self.embed = nn.Linear(channels * patch * patch, width)
        self.positions = nn.Embedding((side // patch) ** 2, width)
        nn.init.normal_(self.positions.weight, std=0.02)
        blocks = [TransformerBlock(width, heads) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[N, num_classes]` of images `[N, C, side, side]`."""
        columns = F.unfold(x, self.patch, stride=self.patch)
        patches = columns.transpose(1, 2)
        count = patches.shape[1]
        places = torch.arange(count, device=x.device)
        places = places.expand(len(x), -1)
        x = self.embed(patches) + self.positions(places)
        x = self.blocks(x)
        features = self.norm(x).mean(1)
        return self.head(features)


def mnist_vit(num_classes: int = 10) -> VisionTransformer:
    """Build the transformer of the DP-KFC paper's tracking study.

    It has two blocks of width 64 with four heads: 14 linear layers.
    """
    image = (1, 28)
    return VisionTransformer(image, patch=7, width=64, depth=2, num_classes=num_classes)


def cifar_vit(num_classes: int = 10) -> VisionTransformer:
    """Build four blocks of width 128 on 64 patches of 4×4."""
    image = (3, 32)
    return VisionTransformer(image, patch=4, width=128, depth=4, num_classes=num_classes)
