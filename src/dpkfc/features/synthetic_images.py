"""Draw images from which an encoder can learn: leaves of several shapes, colours and textures.

Leaves lie over one another, as in `dpkfc.curvature.DeadLeaves`. Here they are discs, boxes and
triangles, turned and stretched, and most carry a grating. A part of the images is smooth noise with
a random spectrum. All of it runs on the device of the generator, one leaf of every image at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpkfc.curvature.probes import Probe, Sample

_LEAVES = 40
# Radii as parts of the side.
_SMALLEST = 0.06
_LARGEST = 0.6
# Share of the images that are noise.
_NOISE = 0.15


def draw_images(n: int, side: int, generator: torch.Generator) -> Tensor:
    """Return colour images `[n, 3, side, side]` with values in [0, 1].

    Args:
        n: number of images.
        side: height and width in pixels.
        generator: its device is that of the images.
    """
    draw = Draw(n, generator)
    leaves = _draw_leaves(side, draw)
    noise = _draw_noise(side, draw)
    is_noise = draw.uniform() < _NOISE
    images = torch.where(is_noise, noise, leaves)
    # A light from one side, as a photograph has.
    slope = 0.15 * draw.normal(2)
    place = torch.linspace(-1, 1, side, device=generator.device)
    light = slope[0] * place.view(1, 1, 1, side) + slope[1] * place.view(1, 1, side, 1)
    return (images + light).clamp(0, 1)


@dataclass(frozen=True)
class Draw:
    """Draws one number, or a few, for each of n images."""

    n: int
    generator: torch.Generator

    def uniform(self, *before: int) -> Tensor:
        """Return numbers in [0, 1), `[*before, n, 1, 1, 1]`."""
        return self._numbers(torch.rand, *before, self.n, 1, 1, 1)

    def between(self, low: float, high: float) -> Tensor:
        """Return numbers in [low, high), `[n, 1, 1, 1]`."""
        return low + (high - low) * self.uniform()

    def normal(self, *before: int) -> Tensor:
        """Return standard normal numbers `[*before, n, 1, 1, 1]`."""
        return self._numbers(torch.randn, *before, self.n, 1, 1, 1)

    def angle(self, *before: int) -> Tensor:
        """Return angles in [0, 2π), `[*before, n, 1, 1, 1]`."""
        return 2 * math.pi * self.uniform(*before)

    def shaped(self, kind: Any, *shape: int) -> Tensor:
        """Return numbers of `torch.rand` or `torch.randn`, `[n, *shape]`."""
        return self._numbers(kind, self.n, *shape)

    def _numbers(self, kind: Any, *shape: int) -> Tensor:
        generator = self.generator
        numbers: Tensor = kind(*shape, generator=generator, device=generator.device)
        return numbers

    def colours(self) -> Tensor:
        """Return colours `[n, 3, 1, 1]` whose channels are correlated, as those of objects are."""
        common = self.normal()
        own = self.shaped(torch.randn, 3, 1, 1)
        return (0.5 + 0.22 * common + 0.14 * own).clamp(0, 1)


def _turn(across: Tensor, down: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Return coordinates along and beside a direction."""
    along = across * angle.cos() + down * angle.sin()
    beside = down * angle.cos() - across * angle.sin()
    return along, beside


def _draw_leaves(side: int, draw: Draw) -> Tensor:
    """Return images of leaves over a ground of one colour."""
    axis = (torch.arange(side, device=draw.generator.device) + 0.5) / side
    down = axis.view(1, 1, side, 1)
    across = axis.view(1, 1, 1, side)
    images = draw.colours().expand(draw.n, 3, side, side)
    # Images differ in how many leaves they have and how large these are.
    wanted = _LEAVES * draw.uniform().square() + 5
    power = 1 - (1.5 + 2 * draw.uniform())
    low = _SMALLEST**power
    high = _LARGEST**power
    for leaf in range(_LEAVES):
        radius = (low + draw.uniform() * (high - low)) ** (1 / power)
        place = draw.uniform(2) * 1.4 - 0.2
        angle = draw.angle()
        stretch = torch.exp(0.5 * draw.normal())
        along, beside = _turn(across - place[0], down - place[1], angle)
        along = along * stretch / radius
        beside = beside / (stretch * radius)
        is_inside = _is_inside(along, beside, draw.uniform())
        paint = draw.colours() + _draw_grating(along, beside, draw)
        images = torch.where(is_inside & (leaf < wanted), paint, images)
    return images


def _is_inside(along: Tensor, beside: Tensor, kind: Tensor) -> Tensor:
    """Return the pixels inside of a disc, a box or a triangle of radius one."""
    disc = along.square() + beside.square() <= 1
    box = torch.maximum(along.abs(), beside.abs()) <= 0.9
    triangle = (beside >= -0.6) & (beside + 1.7 * along.abs() <= 1.1)
    corners = torch.where(kind < 0.8, box, triangle)
    return torch.where(kind < 0.45, disc, corners)


def _draw_grating(along: Tensor, beside: Tensor, draw: Draw) -> Tensor:
    """Return stripes or checks across each leaf: `[n, 3, side, side]` around zero."""
    angle = draw.angle()
    frequency = 2 + 12 * draw.uniform().square()
    phase = draw.angle(2)
    first, second = _turn(along, beside, angle)
    stripes = torch.sin(frequency * first + phase[0])
    crossed = torch.sin(frequency * second + phase[1])
    is_check = draw.uniform() < 0.3
    wave = torch.where(is_check, stripes * crossed, stripes)
    is_sharp = draw.uniform() < 0.4
    wave = torch.where(is_sharp, wave.sign(), wave)
    strength = 0.35 * (draw.uniform() - 0.3).clamp(min=0)
    tint = 0.5 + draw.shaped(torch.rand, 3, 1, 1)
    return strength * tint * wave


def _draw_noise(side: int, draw: Draw) -> Tensor:
    """Return noise with a spectrum of 1 / f^a, another a and direction for every image."""
    device = draw.generator.device
    white = draw.shaped(torch.randn, 3, side, side)
    mix = torch.eye(3, device=device) + 0.8 * draw.shaped(torch.rand, 3, 3)
    white = torch.einsum("ncd,ndhw->nchw", mix, white)
    frequencies = torch.fft.fftfreq(side, device=device)
    down = frequencies.view(1, 1, side, 1)
    across = frequencies.view(1, 1, 1, side)
    angle = math.pi * draw.uniform()
    stretch = torch.exp(0.6 * draw.normal())
    along, beside = _turn(across, down, angle)
    squared = (along * stretch).square() + (beside / stretch).square()
    frequency = squared.sqrt().clamp_min(1 / side)
    exponent = 0.5 + 1.5 * draw.uniform()
    spectrum = torch.fft.fft2(white) / frequency**exponent
    x = torch.fft.ifft2(spectrum).real
    deviation = x.std((1, 2, 3), keepdim=True)
    x = (x - x.mean((2, 3), keepdim=True)) / deviation
    return draw.colours() + 0.22 * x


@dataclass(frozen=True)
class SyntheticImages(Probe):
    """Images of leaves and noise as a probe, with values in [-1, 1]; grey ones are the mean colour.

    Attributes:
        shape: `(channels, height, width)`, of 1 or 3 channels.
    """

    shape: tuple[int, int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.shape) != 3 or self.shape[0] not in (1, 3):
            raise ValueError(
                f"SyntheticImages: shape must be (1 or 3, height, width), got {self.shape}"
            )

    def sample(self, n: int, generator: torch.Generator) -> Sample:
        """Return images `[n, channels, height, width]` on the CPU; no labels."""
        channels, height, width = self.shape
        images = draw_images(n, max(height, width), generator)
        images = images[..., :height, :width]
        if channels == 1:
            images = images.mean(1, keepdim=True)
        return 2 * images.contiguous() - 1, None

    def describe(self) -> dict[str, Any]:
        """Return plain values for plans and cards."""
        return {"source": "synthetic", "kind": "leaves and noise", "shape": list(self.shape)}
