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

from dpkfc.curvature.model_inputs import Sample
from dpkfc.curvature.probes import Probe

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
        generator: its device is also the images'.
    """
    draw = Draw(n, generator)
    leaves = _draw_leaves(side, draw)
    noise = _draw_noise(side, draw)
    is_noise = draw.uniform() < _NOISE
    images = torch.where(is_noise, noise, leaves)
    # A light from one side, as a photograph has.
    slope_across, slope_down = 0.15 * draw.normal(2)
    across = torch.linspace(-1, 1, side, device=generator.device)
    down = across.unsqueeze(1)
    light = slope_across * across + slope_down * down
    lit = images + light
    return lit.clamp(0, 1)


@dataclass(frozen=True)
class Draw:
    """Draws one number, or a few, for each of n images."""

    n: int
    generator: torch.Generator

    def uniform(self, *before: int, shape: Shape = _ONE) -> Tensor:
        """Return numbers in [0, 1), `[*before, n, *shape]`."""
        size = (*before, self.n, *shape)
        device = self.generator.device
        return torch.rand(size, generator=self.generator, device=device)

    def normal(self, *before: int, shape: Shape = _ONE) -> Tensor:
        """Return standard normal numbers `[*before, n, *shape]`."""
        size = (*before, self.n, *shape)
        device = self.generator.device
        return torch.randn(size, generator=self.generator, device=device)

    def draw_between(self, low: float | Tensor, high: float | Tensor) -> Tensor:
        """Return numbers in [low, high), `[n, 1, 1, 1]`."""
        width = high - low
        return low + width * self.uniform()

    def angle(self, *before: int) -> Tensor:
        """Return angles in [0, 2π), `[*before, n, 1, 1, 1]`."""
        turns = self.uniform(*before)
        return 2 * math.pi * turns

    def colours(self) -> Tensor:
        """Return colours `[n, 3, 1, 1]` whose channels are correlated, like objects'."""
        common = 0.22 * self.normal()
        own = 0.14 * self.normal(shape=_COLOUR)
        colours = 0.5 + common + own
        return colours.clamp(0, 1)


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
    across = (pixels + 0.5) / side
    down = across.unsqueeze(1)
    ground = draw.colours()
    images = ground.expand(-1, -1, side, side)
    # Images differ in how many leaves they have and how large these are.
    fullness = draw.uniform().square()
    wanted = 5 + _LEAVES * fullness
    steepness = draw.draw_between(1.5, 3.5)
    power = 1 - steepness
    inverse = 1 / power
    low = _SMALLEST**power
    high = _LARGEST**power
    for leaf in range(_LEAVES):
        radius = draw.draw_between(low, high) ** inverse
        place = draw.uniform(2)
        x, y = place * 1.4 - 0.2
        angle = draw.angle()
        log_stretch = 0.5 * draw.normal()
        stretch = log_stretch.exp()
        x = across - x
        y = down - y
        u, v = _turn(x, y, angle)
        u = u * stretch / radius
        v = v / (stretch * radius)
        kind = draw.uniform()
        is_inside = _is_inside(u, v, kind)
        colour = draw.colours()
        grating = _draw_grating(u, v, draw)
        paint = colour + grating
        is_wanted = leaf < wanted
        is_painted = is_inside & is_wanted
        images = torch.where(is_painted, paint, images)
    return images


def _is_inside(u: Tensor, v: Tensor, kind: Tensor) -> Tensor:
    """Return the pixels inside of a disc, a box or a triangle of radius one."""
    width = u.abs()
    distance = u.square() + v.square()
    disc = distance <= 1
    longest = torch.maximum(width, v.abs())
    box = longest <= 0.9
    is_above_base = v >= -0.6
    height = v + 1.7 * width
    is_below_top = height <= 1.1
    triangle = is_above_base & is_below_top
    is_box = kind < 0.8
    corners = torch.where(is_box, box, triangle)
    is_disc = kind < 0.45
    return torch.where(is_disc, disc, corners)


def _draw_grating(u: Tensor, v: Tensor, draw: Draw) -> Tensor:
    """Return stripes or checks across each leaf: `[n, 3, side, side]` around zero."""
    angle = draw.angle()
    density = draw.uniform().square()
    frequency = 2 + 12 * density
    first_phase, second_phase = draw.angle(2)
    first, second = _turn(u, v, angle)
    first = frequency * first + first_phase
    second = frequency * second + second_phase
    stripes = first.sin()
    checks = stripes * second.sin()
    is_check = draw.uniform() < 0.3
    wave = torch.where(is_check, checks, stripes)
    is_sharp = draw.uniform() < 0.4
    sharp = wave.sign()
    wave = torch.where(is_sharp, sharp, wave)
    # Three leaves in ten have no grating.
    excess = draw.uniform() - 0.3
    strength = excess.clamp(min=0)
    tint = 0.5 + draw.uniform(shape=_COLOUR)
    contrast = 0.35 * strength * tint
    return contrast * wave


def _draw_noise(side: int, draw: Draw) -> Tensor:
    """Return noise with a spectrum of 1 / f^a, another a and direction for every image."""
    device = draw.generator.device
    white = draw.normal(shape=(3, side, side))
    mix = 0.8 * draw.uniform(shape=(3, 3))
    # Each channel keeps its own noise.
    mix += torch.eye(3, device=device)
    white = torch.einsum("ncd,ndhw->nchw", mix, white)
    across = torch.fft.fftfreq(side, device=device)
    down = across.unsqueeze(1)
    angle = draw.draw_between(0, math.pi)
    log_stretch = 0.6 * draw.normal()
    stretch = log_stretch.exp()
    u, v = _turn(across, down, angle)
    u *= stretch
    v /= stretch
    squared = u.square() + v.square()
    lowest = 1 / side
    frequency = squared.sqrt()
    frequency = frequency.clamp_min(lowest)
    exponent = draw.draw_between(0.5, 2.0)
    damping = frequency**exponent
    spectrum = torch.fft.fft2(white)
    spectrum /= damping
    x = torch.fft.ifft2(spectrum).real
    deviation = x.std((1, 2, 3), keepdim=True)
    x -= x.mean((2, 3), keepdim=True)
    x /= deviation
    contrast = 0.22 * x
    ground = draw.colours()
    return ground + contrast


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
        side = max(height, width)
        images = draw_images(n, side, generator)
        images = images[..., :height, :width]
        if channels == 1:
            images = images.mean(1, keepdim=True)
        scaled = 2 * images.contiguous() - 1
        return scaled, None

    def describe(self) -> dict[str, Any]:
        """Return plain values for plans and cards."""
        return {"source": "synthetic", "kind": "leaves and noise", "shape": list(self.shape)}
