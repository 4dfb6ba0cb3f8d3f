"""Probes of random numbers: pink and white noise, feature vectors, and dead leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpkfc._checks import check_integer
from dpkfc.curvature.model_inputs import Sample
from dpkfc.curvature.probes import SyntheticProbe


def _draw_channels(
    size: Sequence[int], axis: int, correlation: float, generator: torch.Generator
) -> Tensor:
    """Return standard normal numbers, float64, whose channels have this correlation.

    Args:
        size: of the result.
        axis: of the channels.
        correlation: in [0, 1].
        generator: what draws.
    """
    own = torch.randn(size, generator=generator, dtype=torch.float64)
    if correlation == 0:
        return own
    one_channel = list(size)
    one_channel[axis] = 1
    common = torch.randn(one_channel, generator=generator, dtype=torch.float64)
    own = math.sqrt(1 - correlation) * own
    return own + math.sqrt(correlation) * common


def _standardize(x: Tensor, mean: float, std: float) -> Tensor:
    """Return examples `[n, ...]` with this mean and standard deviation each, float32.

    A constant example becomes its mean.
    """
    own_mean, spread = moments(x)
    unit = (x - own_mean) / spread.clamp(min=1e-12)
    standardised = mean + std * unit
    return standardised.float()


@dataclass(frozen=True)
class PinkNoise(SyntheticProbe):
    """Gaussian noise with the power spectrum 1 / f^power_exponent, like natural images.

    f is the isotropic radial frequency in cycles per sample. Each axis has its own grid, so sizes
    need not be equal. The amplitude is f^(−power_exponent/2). The zero frequency takes the
    amplitude of the lowest other frequency: it stays finite for every exponent, and a channel's
    mean varies as much as its slowest wave. Every example is then standardised over all channels
    and positions.

    Attributes:
        shape: `(channels, *spatial)` with one spatial axis or more.
        power_exponent: exponent of the POWER spectrum; 0 is white, 1 pink, 2 brown.
        mean, std: of every example.
        channel_correlation: correlation between channels, in [0, 1].

    Source: DP-KFC, Eq. 42 (power 1/f^α, amplitude 1/f^(α/2)).
    """

    shape: tuple[int, ...]
    power_exponent: float = 1.0
    mean: float = 0.0
    std: float = 1.0
    channel_correlation: float = 0.0

    def __post_init__(self) -> None:
        self._check_shape()
        if len(self.shape) < 2 or math.prod(self.shape) < 2:
            raise ValueError(
                f"PinkNoise: shape must be (channels, *spatial), got {self.shape}; vectors: "
                "FeatureNoise"
            )
        self._check_numbers(channel_correlation="[0, 1]", power_exponent="(-inf, inf)")

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return inputs `[n, channels, *spatial]`, float32 on the CPU; no labels."""
        x = _draw_channels((n, *self.shape), 1, self.channel_correlation, generator)
        axes = tuple(range(2, x.dim()))
        spectrum = torch.fft.fftn(x, dim=axes)
        spectrum = spectrum * self._amplitude()
        x = torch.fft.ifftn(spectrum, dim=axes)
        return _standardize(x.real, self.mean, self.std), None

    def _amplitude(self) -> Tensor:
        """Return the amplitude of every frequency, `[*spatial]`."""
        axes = [torch.fft.fftfreq(size, dtype=torch.float64) for size in self.shape[1:]]
        grid = torch.meshgrid(*axes, indexing="ij")
        squares = torch.stack(grid).square()
        radius = squares.sum(0).sqrt()
        if radius.numel() == 1:
            return torch.ones_like(radius)
        lowest = radius[radius > 0].min()
        # In units of the lowest frequency no power of it can overflow.
        relative = (radius / lowest).clamp(min=1.0)
        return relative.pow(-self.power_exponent / 2)


@dataclass(frozen=True)
class WhiteNoise(SyntheticProbe):
    """Independent Gaussian entries.

    Attributes:
        shape: of one example, without the batch axis.
        mean, std: of every entry.
    """

    shape: tuple[int, ...]
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        self._check_shape()
        self._check_numbers()

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return inputs `[n, *shape]`, float32 on the CPU; no labels."""
        normal = torch.randn(n, *self.shape, generator=generator)
        return self.mean + self.std * normal, None


@dataclass(frozen=True)
class FeatureNoise(SyntheticProbe):
    """Gaussian feature vectors, optionally sparse.

    Attributes:
        dim: length of a vector.
        mean, std: of the entries that are not zero.
        density: expected fraction of entries that are not zero, in (0, 1].
    """

    dim: int
    mean: float = 0.0
    std: float = 1.0
    density: float = 1.0

    def __post_init__(self) -> None:
        check_integer("FeatureNoise: dim", self.dim, 1)
        self._check_numbers(density="(0, 1]")

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return inputs `[n, dim]`, float32 on the CPU; no labels."""
        normal = torch.randn(n, self.dim, generator=generator)
        x = self.mean + self.std * normal
        if self.density < 1:
            uniform = torch.rand(n, self.dim, generator=generator)
            x = x * (uniform < self.density)
        return x, None


@dataclass(frozen=True)
class DeadLeaves(SyntheticProbe):
    """Dead leaves: discs that lie over one another, with the edges that Gaussian noise lacks.

    Discs have random places, sizes and levels. Each covers those before it, on a ground with a
    level of its own. The density of radii falls as r^−size_exponent between two bounds. With
    exponent 3 an image looks alike at every scale, as natural images do, and its spectrum is close
    to pink noise's. Every example is then standardised over all its channels and positions.

    Attributes:
        shape: `(channels, height, width)`.
        leaves: discs an image; with few of them much of the ground shows.
        size_exponent: of the density of radii, above 1.
        smallest: radius in pixels; a disc below two is only a speck.
        largest: radius as a fraction of the longer side.
        mean, std: of every example.
        channel_correlation: correlation between the channels of a leaf, in [0, 1].

    Source: Matheron (1968); scale invariance at exponent 3: Lee, Mumford and Huang (2001).
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
        self._check_shape()
        if len(self.shape) != 3 or math.prod(self.shape) < 2:
            raise ValueError(
                f"DeadLeaves: shape must be (channels, height, width), got {self.shape}; other "
                "inputs: WhiteNoise"
            )
        check_integer("DeadLeaves: leaves", self.leaves, 1)
        radii = "(0, inf)"
        self._check_numbers(
            channel_correlation="[0, 1]", size_exponent="(1, inf)", smallest=radii, largest=radii
        )
        if not self.smallest <= self._largest:
            raise ValueError(
                f"DeadLeaves: radii must lie above 0 and grow, got {self.smallest} to "
                f"{self._largest:g} pixels (largest × side)"
            )

    @property
    def _largest(self) -> float:
        return self.largest * max(self.shape[1:])

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return inputs `[n, channels, height, width]`, float32 on the CPU; no labels."""
        channels, height, width = self.shape
        shape = (self.leaves, n, 1, 1, 1)
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        radius = self._radii(uniform)
        # Centres lie up to a radius outside of the image, so that the border looks like the middle.
        place = torch.rand(2, *shape, generator=generator, dtype=torch.float64)
        diameter = 2 * radius
        down_centre = place[0] * (height + diameter) - radius
        across_centre = place[1] * (width + diameter) - radius
        # The last three axes stand for the channels, the height and the width.
        size = (self.leaves + 1, n, channels, 1, 1)
        ground, *colours = _draw_channels(size, 2, self.channel_correlation, generator)
        x = ground.repeat(1, 1, height, width)
        down = torch.arange(height) + 0.5
        down = down.view(-1, 1)
        across = torch.arange(width) + 0.5
        for leaf, colour in enumerate(colours):
            dy = down - down_centre[leaf]
            dx = across - across_centre[leaf]
            squares = dy.square() + dx.square()
            is_inside = squares <= radius[leaf].square()
            x = torch.where(is_inside, colour, x)
        return _standardize(x, self.mean, self.std), None

    def _radii(self, uniform: Tensor) -> Tensor:
        """Return radii of the density, from uniform numbers by its inverse distribution."""
        power = 1 - self.size_exponent
        low = self.smallest**power
        high = self._largest**power
        powers = low + uniform * (high - low)
        return powers ** (1 / power)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of every example, `[n, 1, ...]`."""
    flat = x.flatten(1)
    shape = (-1, *[1] * (x.dim() - 1))
    mean = flat.mean(1).view(shape)
    deviation = flat.std(1, correction=0).view(shape)
    return mean, deviation
