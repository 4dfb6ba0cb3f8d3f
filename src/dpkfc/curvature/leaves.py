"""Dead leaves: images of discs that lie over one another, with the edges and flat parts that Gaussian noise has not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpkfc.curvature.inputs import Sample
from dpkfc.curvature.probes import check_correlation, check_level, correlated, described, standardised

__all__ = ["DeadLeaves"]


@dataclass(frozen=True)
class DeadLeaves:
    """Discs of random place, size and level, each over those before it, on a ground of a level of its own.

    Radii have a density that falls as r^−size_exponent between two bounds; with exponent 3 an image looks alike at every scale,
    as natural images do: its spectrum is close to that of pink noise, and unlike it it has edges. Every example is then
    standardised over all its channels and positions.

    Attributes:
        shape: `(channels, height, width)`.
        leaves: discs an image; few leave much of the ground in sight.
        size_exponent: of the density of radii, above 1.
        smallest: radius in pixels; below two a disc is no more than a speck.
        largest: radius as a share of the longer side.
        mean, std: of every example.
        channel_correlation: correlation between the channels of a leaf, in [0, 1].

    Source: the dead leaves model of Matheron (1968); scale invariance at exponent 3: Lee, Mumford and Huang (2001).
    """

    shape: tuple[int, ...]
    leaves: int = 32
    size_exponent: float = 3.0
    smallest: float = 2.0
    largest: float = 0.5
    mean: float = 0.0
    std: float = 1.0
    channel_correlation: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        check_level("DeadLeaves", self.shape, self.mean, self.std)
        if len(self.shape) != 3 or math.prod(self.shape) < 2:
            raise ValueError(f"DeadLeaves: shape must be (channels, height, width), got {self.shape}; other inputs: WhiteNoise")
        if not isinstance(self.leaves, int) or self.leaves < 1:
            raise ValueError(f"DeadLeaves: leaves must be a whole number of 1 or more, got {self.leaves}")
        if not (self.size_exponent > 1 and math.isfinite(self.size_exponent)):
            raise ValueError(f"DeadLeaves: size_exponent must be finite and above 1, got {self.size_exponent}")
        if not 0 < self.smallest <= self._largest < math.inf:
            raise ValueError(
                f"DeadLeaves: radii must lie above 0 and grow, got {self.smallest} to {self._largest:g} pixels (largest × side)"
            )
        check_correlation("DeadLeaves", self.channel_correlation)

    @property
    def _largest(self) -> float:
        return self.largest * max(self.shape[1:])

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Inputs `[n, channels, height, width]`, float32 on the CPU; no labels."""
        channels, height, width = self.shape
        radius = self._radii(torch.rand(self.leaves, n, generator=generator, dtype=torch.float64))
        # Centres lie up to a radius outside of the image, so that its border is no different from its middle.
        place = torch.rand(2, self.leaves, n, generator=generator, dtype=torch.float64)
        centre = [place[i] * (size + 2 * radius) - radius for i, size in enumerate((height, width))]
        level = torch.randn(self.leaves + 1, n, channels, generator=generator, dtype=torch.float64)
        if self.channel_correlation > 0:
            common = torch.randn(self.leaves + 1, n, 1, generator=generator, dtype=torch.float64)
            level = correlated(level, common, self.channel_correlation)
        x = level[0].view(n, channels, 1, 1).repeat(1, 1, height, width)
        down, across = torch.arange(height) + 0.5, torch.arange(width) + 0.5
        for leaf in range(self.leaves):
            rows = (down - centre[0][leaf].view(n, 1)).square().view(n, height, 1)
            columns = (across - centre[1][leaf].view(n, 1)).square().view(n, 1, width)
            inside = rows + columns <= radius[leaf].square().view(n, 1, 1)
            x = torch.where(inside.unsqueeze(1), level[leaf + 1].view(n, channels, 1, 1), x)
        return standardised(x, self.mean, self.std), None

    def _radii(self, uniform: Tensor) -> Tensor:
        """Radii of the density, from uniform numbers by its inverse distribution function."""
        power = 1 - self.size_exponent
        low, high = self.smallest**power, self._largest**power
        return (low + uniform * (high - low)) ** (1 / power)

    def describe(self) -> dict[str, Any]:
        """JSON-able description."""
        return described(self)
