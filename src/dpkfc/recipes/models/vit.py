"""A small vision transformer whose every map is a linear layer of its own, so that each has its Kronecker factors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["VisionTransformer", "cifar_vit", "mnist_vit"]


class _Block(nn.Module):
    """Pre-norm attention and a two-layer map, six linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.map_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        query, key, value = (self._split(linear(normed)) for linear in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.narrow(F.gelu(self.wide(self.map_norm(x))))

    def _split(self, x: Tensor) -> Tensor:
        """`[N, T, width]` to `[N, heads, T, width / heads]`."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


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
        self, image: tuple[int, int], *, patch: int, width: int, depth: int, heads: int = 4, num_classes: int = 10
    ) -> None:
        super().__init__()
        channels, side = image
        self.patch = patch
        self.embed = nn.Linear(channels * patch * patch, width)
        self.positions = nn.Embedding((side // patch) ** 2, width)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `[N, num_classes]` of images `[N, C, side, side]`."""
        patches = F.unfold(x, self.patch, stride=self.patch).transpose(1, 2)
        rows = torch.arange(patches.shape[1], device=x.device).expand(len(x), -1)
        tokens = self.embed(patches) + self.positions(rows)
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def mnist_vit(num_classes: int = 10) -> VisionTransformer:
    """Two blocks of width 64 with four heads, 14 linear layers: the transformer of the DP-KFC paper's tracking study."""
    return VisionTransformer((1, 28), patch=7, width=64, depth=2, num_classes=num_classes)


def cifar_vit(num_classes: int = 10) -> VisionTransformer:
    """Four blocks of width 128 on 64 patches of 4×4."""
    return VisionTransformer((3, 32), patch=4, width=128, depth=4, num_classes=num_classes)
