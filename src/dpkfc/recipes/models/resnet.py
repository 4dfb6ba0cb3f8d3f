"""ResNet-20 for 32×32 colour images with GroupNorm (He et al. 2016; Wu and He 2018)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["resnet20"]

_GROUPS = 8


class _Block(nn.Module):
    """Two 3×3 convolutions; where the shape changes the skip takes every second pixel and pads channels with zeros."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(_GROUPS, channels_out)
        self.second = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(_GROUPS, channels_out)
        self.stride, self.added = stride, channels_out - channels_in

    def forward(self, x: Tensor) -> Tensor:
        skip = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        residual = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        return F.relu(residual + skip)


def resnet20(num_classes: int = 10) -> nn.Sequential:
    """Nineteen convolutions with GroupNorm in place of BatchNorm and one linear layer, 269,722 parameters for ten classes.

    Shortcuts without parameters (option A of He et al. 2016). Input `[N, 3, 32, 32]`, output `[N, num_classes]`.
    """
    blocks, channels = list[nn.Module](), 16
    for stride, wide in ((1, 16), (2, 32), (2, 64)):
        for i in range(3):
            blocks.append(_Block(channels, wide, stride if i == 0 else 1))
            channels = wide
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    return nn.Sequential(
        stem, nn.GroupNorm(_GROUPS, 16), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes)
    )
