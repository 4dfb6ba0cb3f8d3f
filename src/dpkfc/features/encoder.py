"""An encoder of small colour images: a wide residual network whose norms have fixed statistics.

It was trained on synthetic images alone, so neither private nor public data are in its weights.

Source: Zagoruyko and Komodakis (2016), WRN-d-k.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut: nn.Conv2d | None = None
        if inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(x))
        residual = x if self.shortcut is None else self.shortcut(y)
        z = self.conv1(y)
        return residual + self.conv2(functional.relu(self.norm2(z)))


class Encoder(nn.Module):
    """A wide residual network without its head: images `[B, 3, H, W]` to `[B, 64 k, H/4, W/4]`.

    Args:
        depth: 6 n + 4 layers.
        width: k, the factor on the channels 16, 32 and 64.
    """

    def __init__(self, depth: int = 16, width: int = 4) -> None:
        super().__init__()
        channels = [16, 16 * width, 32 * width, 64 * width]
        self.stem = nn.Conv2d(3, channels[0], 3, 1, 1, bias=False)
        blocks: list[nn.Module] = []
        for stage in range(3):
            inputs, outputs = channels[stage], channels[stage + 1]
            for number in range((depth - 4) // 6):
                stride = 2 if stage and not number else 1
                blocks.append(_Block(inputs if not number else outputs, outputs, stride))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(channels[-1])

    def forward(self, x: Tensor) -> Tensor:
        """Return the features at every position."""
        features: Tensor = functional.relu(self.norm(self.blocks(self.stem(2 * x - 1))))
        return features
