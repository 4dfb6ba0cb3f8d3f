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
Shape = tuple[int, ...]
_ONE = (1, 1, 1)
_COLOUR = (3, 1, 1)


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
    places = torch.linspace(-1, 1, side, device=generator.device)
    down, across = _axes(places)
    light = slope[0] * across + slope[1] * down
    return (images + light).clamp(0, 1)


@dataclass(frozen=True)
class Draw:
    """Draws one number, or a few, for each of n images."""

    n: int
    generator: torch.Generator

    def uniform(self, *before: int, shape: Shape = _ONE) -> Tensor:
        """Return numbers in [0, 1), `[*before, n, *shape]`."""
        return self._numbers(torch.rand, before, shape)

    def normal(self, *before: int, shape: Shape = _ONE) -> Tensor:
        """Return standard normal numbers `[*before, n, *shape]`."""
        return self._numbers(torch.randn, before, shape)

    def _numbers(self, kind: Any, before: Shape, shape: Shape) -> Tensor:
        size = (*before, self.n, *shape)
        device = self.generator.device
        numbers: Tensor = kind(size, generator=self.generator, device=device)
        return numbers

    def between(self, low: float | Tensor, high: float | Tensor) -> Tensor:
        """Return numbers in [low, high), `[n, 1, 1, 1]`."""
        width = high - low
        return low + width * self.uniform()

    def angle(self, *before: int) -> Tensor:
        """Return angles in [0, 2π), `[*before, n, 1, 1, 1]`."""
        return 2 * math.pi * self.uniform(*before)

    def colours(self) -> Tensor:
        """Return colours `[n, 3, 1, 1]` whose channels are correlated, as those of objects are."""
        common = 0.22 * self.normal()
        own = 0.14 * self.normal(shape=_COLOUR)
        return (0.5 + common + own).clamp(0, 1)


def _axes(places: Tensor) -> tuple[Tensor, Tensor]:
    """Return places along the height and along the width, so that they broadcast over images."""
    down = places.view(1, 1, -1, 1)
    across = places.view(1, 1, 1, -1)
    return down, across


def _turn(across: Tensor, down: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Return coordinates (u, v) along a direction and at right angles to it."""
    cosine = angle.cos()
    sine = angle.sin()
    u = across * cosine + down * sine
    v = down * cosine - across * sine
    return u, v


def _draw_leaves(side: int, draw: Draw) -> Tensor:
    """Return images of leaves over a ground of one colour."""
    pixels = torch.arange(side, device=draw.generator.device)
    places = (pixels + 0.5) / side
    down, across = _axes(places)
    ground = draw.colours()
    images = ground.expand(-1, -1, side, side)
    # Images differ in how many leaves they have and how large these are.
    wanted = _LEAVES * draw.uniform().square() + 5
    power = 1 - draw.between(1.5, 3.5)
    low = _SMALLEST**power
    high = _LARGEST**power
    for leaf in range(_LEAVES):
        radius = draw.between(low, high) ** (1 / power)
        place = draw.uniform(2) * 1.4 - 0.2
        angle = draw.angle()
        stretch = torch.exp(0.5 * draw.normal())
        x = across - place[0]
        y = down - place[1]
        u, v = _turn(x, y, angle)
        u = u * stretch / radius
        v = v / (stretch * radius)
        is_inside = _is_inside(u, v, draw.uniform())
        paint = draw.colours()
        paint = paint + _draw_grating(u, v, draw)
        is_painted = is_inside & (leaf < wanted)
        images = torch.where(is_painted, paint, images)
    return images


def _is_inside(u: Tensor, v: Tensor, kind: Tensor) -> Tensor:
    """Return the pixels inside of a disc, a box or a triangle of radius one."""
    width = u.abs()
    distance = u.square() + v.square()
    disc = distance <= 1
    box = torch.maximum(width, v.abs()) <= 0.9
    is_above_base = v >= -0.6
    is_below_top = v + 1.7 * width <= 1.1
    triangle = is_above_base & is_below_top
    corners = torch.where(kind < 0.8, box, triangle)
    return torch.where(kind < 0.45, disc, corners)


def _draw_grating(u: Tensor, v: Tensor, draw: Draw) -> Tensor:
    """Return stripes or checks across each leaf: `[n, 3, side, side]` around zero."""
    angle = draw.angle()
    frequency = 2 + 12 * draw.uniform().square()
    phase = draw.angle(2)
    first, second = _turn(u, v, angle)
    stripes = torch.sin(frequency * first + phase[0])
    crossed = torch.sin(frequency * second + phase[1])
    is_check = draw.uniform() < 0.3
    wave = torch.where(is_check, stripes * crossed, stripes)
    is_sharp = draw.uniform() < 0.4
    wave = torch.where(is_sharp, wave.sign(), wave)
    # Three leaves in ten have no grating.
    excess = (draw.uniform() - 0.3).clamp(min=0)
    tint = 0.5 + draw.uniform(shape=_COLOUR)
    return 0.35 * excess * tint * wave


def _draw_noise(side: int, draw: Draw) -> Tensor:
    """Return noise with a spectrum of 1 / f^a, another a and direction for every image."""
    device = draw.generator.device
    white = draw.normal(shape=(3, side, side))
    mix = torch.eye(3, device=device) + 0.8 * draw.uniform(shape=(3, 3))
    white = torch.einsum("ncd,ndhw->nchw", mix, white)
    frequencies = torch.fft.fftfreq(side, device=device)
    down, across = _axes(frequencies)
    angle = draw.between(0, math.pi)
    stretch = torch.exp(0.6 * draw.normal())
    u, v = _turn(across, down, angle)
    u *= stretch
    v /= stretch
    squared = u.square() + v.square()
    frequency = squared.sqrt().clamp_min(1 / side)
    exponent = draw.between(0.5, 2.0)
    spectrum = torch.fft.fft2(white)
    spectrum /= frequency**exponent
    x = torch.fft.ifft2(spectrum).real
    deviation = x.std((1, 2, 3), keepdim=True)
    x -= x.mean((2, 3), keepdim=True)
    contrast = 0.22 * (x / deviation)
    return draw.colours() + contrast


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
