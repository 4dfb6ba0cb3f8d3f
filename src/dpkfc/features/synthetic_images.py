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
_SMALLEST, _LARGEST = 0.06, 0.6  # radii as parts of the side
_SHARE_OF_NOISE = 0.15  # of the images


def draw_images(n: int, side: int, generator: torch.Generator) -> Tensor:
    """Return colour images `[n, 3, side, side]` with values in [0, 1].

    Args:
        n: number of images.
        side: height and width in pixels.
        generator: its device is that of the images.
    """
    leaves = _draw_leaves(n, side, generator)
    noise = _draw_noise(n, side, generator)
    is_noise = _uniform(generator, n, 1, 1, 1) < _SHARE_OF_NOISE
    images = torch.where(is_noise, noise, leaves)
    # A light from one side, as a photograph has.
    slope = 0.15 * torch.randn(2, n, 1, 1, 1, generator=generator, device=generator.device)
    across = torch.linspace(-1, 1, side, device=generator.device)
    light = slope[0] * across.view(1, 1, 1, side) + slope[1] * across.view(1, 1, side, 1)
    return (images + light).clamp(0, 1)


def _uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator, device=generator.device)


def _draw_colours(n: int, generator: torch.Generator) -> Tensor:
    """Return colours `[n, 3, 1, 1]` whose channels are correlated, as those of objects are."""
    common = torch.randn(n, 1, 1, 1, generator=generator, device=generator.device)
    own = torch.randn(n, 3, 1, 1, generator=generator, device=generator.device)
    return (0.5 + 0.22 * common + 0.14 * own).clamp(0, 1)


def _draw_leaves(n: int, side: int, generator: torch.Generator) -> Tensor:
    """Return images of leaves over a ground of one colour."""
    axis = (torch.arange(side, device=generator.device) + 0.5) / side
    down, across = axis.view(1, 1, side, 1), axis.view(1, 1, 1, side)
    images = _draw_colours(n, generator).expand(n, 3, side, side)
    # Images differ in how many leaves they have and how large these are.
    wanted = _LEAVES * _uniform(generator, n, 1, 1, 1).square() + 5
    exponent = 1.5 + 2 * _uniform(generator, n, 1, 1, 1)
    for leaf in range(_LEAVES):
        power = 1 - exponent
        low, high = _SMALLEST**power, _LARGEST**power
        radius = (low + _uniform(generator, n, 1, 1, 1) * (high - low)) ** (1 / power)
        place = _uniform(generator, 2, n, 1, 1, 1) * 1.4 - 0.2
        turn = 2 * math.pi * _uniform(generator, n, 1, 1, 1)
        stretch = torch.exp(0.5 * torch.randn(n, 1, 1, 1, generator=generator, device=axis.device))
        right, below = across - place[0], down - place[1]
        along = (right * turn.cos() + below * turn.sin()) * stretch / radius
        beside = (below * turn.cos() - right * turn.sin()) / (stretch * radius)
        is_inside = _inside(along, beside, _uniform(generator, n, 1, 1, 1))
        paint = _draw_colours(n, generator) + _draw_grating(along, beside, generator)
        images = torch.where(is_inside & (leaf < wanted), paint, images)
    return images


def _inside(along: Tensor, beside: Tensor, kind: Tensor) -> Tensor:
    """Return the pixels inside of a disc, a box or a triangle of radius one."""
    disc = along.square() + beside.square() <= 1
    box = torch.maximum(along.abs(), beside.abs()) <= 0.9
    triangle = (beside >= -0.6) & (beside + 1.7 * along.abs() <= 1.1)
    return torch.where(kind < 0.45, disc, torch.where(kind < 0.8, box, triangle))


def _draw_grating(along: Tensor, beside: Tensor, generator: torch.Generator) -> Tensor:
    """Return stripes or checks across each leaf: `[n, 3, side, side]` around zero."""
    n = along.shape[0]
    turn = 2 * math.pi * _uniform(generator, n, 1, 1, 1)
    frequency = 2 + 12 * _uniform(generator, n, 1, 1, 1).square()
    phase = 2 * math.pi * _uniform(generator, 2, n, 1, 1, 1)
    stripes = torch.sin(frequency * (along * turn.cos() + beside * turn.sin()) + phase[0])
    crossed = torch.sin(frequency * (beside * turn.cos() - along * turn.sin()) + phase[1])
    is_check = _uniform(generator, n, 1, 1, 1) < 0.3
    wave = torch.where(is_check, stripes * crossed, stripes)
    is_sharp = _uniform(generator, n, 1, 1, 1) < 0.4
    wave = torch.where(is_sharp, wave.sign(), wave)
    strength = 0.35 * (_uniform(generator, n, 1, 1, 1) - 0.3).clamp(min=0)
    tint = 0.5 + _uniform(generator, n, 3, 1, 1)
    return strength * tint * wave


def _draw_noise(n: int, side: int, generator: torch.Generator) -> Tensor:
    """Return noise with a spectrum of 1 / f^a, another a and direction for every image."""
    white = torch.randn(n, 3, side, side, generator=generator, device=generator.device)
    mix = torch.eye(3, device=generator.device) + 0.8 * _uniform(generator, n, 3, 3)
    white = torch.einsum("ncd,ndhw->nchw", mix, white)
    down = torch.fft.fftfreq(side, device=generator.device).view(1, 1, side, 1)
    across = torch.fft.fftfreq(side, device=generator.device).view(1, 1, 1, side)
    turn = math.pi * _uniform(generator, n, 1, 1, 1)
    stretch = torch.exp(0.6 * torch.randn(n, 1, 1, 1, generator=generator, device=down.device))
    along = (across * turn.cos() + down * turn.sin()) * stretch
    beside = (down * turn.cos() - across * turn.sin()) / stretch
    frequency = (along.square() + beside.square()).sqrt().clamp_min(1 / side)
    exponent = 0.5 + 1.5 * _uniform(generator, n, 1, 1, 1)
    x = torch.fft.ifft2(torch.fft.fft2(white) / frequency**exponent).real
    x = (x - x.mean((2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True)
    return _draw_colours(n, generator) + 0.22 * x


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
        images = draw_images(n, max(height, width), generator)[..., :height, :width]
        if channels == 1:
            images = images.mean(1, keepdim=True)
        return 2 * images.contiguous() - 1, None

    def describe(self) -> dict[str, Any]:
        """Return plain values for plans and cards."""
        return {"source": "synthetic", "kind": "leaves and noise", "shape": list(self.shape)}
