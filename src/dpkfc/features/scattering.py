"""Wavelet scattering: fixed features of images from Morlet wavelets and moduli, without training.

For an image x, wavelets ψ(j, θ) at scales 2^j and angles θ, and a low-pass filter φ at scale 2^J:

    S0 = x ∗ φ
    S1 = |x ∗ ψ(j, θ)| ∗ φ
    S2 = ||x ∗ ψ(j, θ)| ∗ ψ(j′, θ′)| ∗ φ    for j′ > j

Each is read at every 2^J-th position. With J scales and L angles, a channel gives
1 + J L + L² J (J − 1) / 2 features a position. Small shifts and deformations of an image change
them little.

Source: Bruna and Mallat (2013), sections 2 and 3. Private training on them: Tramèr and Boneh
(2021).
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from dpkfc._checks import check_integer, check_one_of

# Channels, height and width.
ImageShape = tuple[int, int, int]
# The wavelet of the first scale: width of its envelope and frequency, in pixels and radians.
_WIDTH = 0.8
_FREQUENCY = 3 * math.pi / 4
# Copies of the spectrum that a filter of the grid sums over, on either side.
_PERIODS = 2


@dataclass(frozen=True)
class Scattering:
    """Settings of a scattering transform.

    Attributes:
        shape: `(channels, height, width)` of an image.
        scales: J, at least 1; features have one position for each 2^J × 2^J pixels.
        angles: L, angles in [0, π).
        order: 1 leaves S2 out.

    Raises:
        ValueError: a number below its least value, or an image smaller than 2^J.

    Example:
        >>> transform = Scattering((1, 28, 28)).build()
        >>> transform(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 81, 7, 7])
    """

    shape: ImageShape
    scales: int = 2
    angles: int = 8
    order: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.shape) != 3 or min(self.shape) < 1:
            raise ValueError(
                f"Scattering: shape must be (channels, height, width), got {self.shape}"
            )
        check_integer("Scattering: scales", self.scales, 1)
        check_integer("Scattering: angles", self.angles, 1)
        check_one_of("Scattering: order", self.order, (1, 2))
        _, height, width = self.shape
        least = 2**self.scales
        if min(height, width) < least:
            raise ValueError(
                f"Scattering: {self.scales} scales need images of {least} pixels a side, "
                f"got {height} × {width}; lower scales"
            )

    @property
    def feature_shape(self) -> ImageShape:
        """Return channels, height and width of the features of one image."""
        channels, height, width = self.shape
        paths = 1 + self.scales * self.angles
        if self.order == 2:
            pairs = math.comb(self.scales, 2)
            paths += self.angles**2 * pairs
        step = 2**self.scales
        return channels * paths, height // step, width // step

    def build(self) -> ScatteringTransform:
        """Return the transform as a module without parameters."""
        return ScatteringTransform(self)

    def describe(self) -> dict[str, object]:
        """Return plain values for a privacy card."""
        settings = asdict(self)
        settings["shape"] = list(self.shape)
        return {"kind": "Scattering", **settings}


def check_images(x: Tensor, shape: ImageShape) -> None:
    """Refuse images `[B, C, H, W]` of another shape than a feature map was made for.

    Raises:
        ValueError: naming both shapes.
    """
    if tuple(x.shape[1:]) != shape:
        raise ValueError(
            f"the features are for images of shape {shape}, got {tuple(x.shape[1:])}; make them for"
            " that shape"
        )


class ScatteringTransform(nn.Module):
    """A scattering transform of images `[B, C, H, W]` into `[B, C·K, H // 2^J, W // 2^J]`.

    It has no parameters. Filters are buffers, so the module moves with `.to` and is differentiable.
    Images are padded by reflection before they are filtered.
    """

    def __init__(self, settings: Scattering) -> None:
        super().__init__()
        self._wavelets: Tensor
        self._rows: Tensor
        self._columns: Tensor
        self._smooth_rows: Tensor
        self._smooth_columns: Tensor
        self.settings = settings
        scales = settings.scales
        angles = settings.angles
        step = 2**scales
        _, height, width = settings.shape
        rows = _reflected_positions(height, step)
        columns = _reflected_positions(width, step)
        height = len(rows)
        width = len(columns)
        _, down, across = settings.feature_shape
        wavelets = []
        for scale in range(scales):
            for angle in range(angles):
                wavelet = _morlet(height, width, scale, angle, angles)
                wavelets.append(_spectrum(wavelet))
        stacked = torch.stack(wavelets)
        buffers = {
            "_rows": rows.unsqueeze(1),
            "_columns": columns,
            "_wavelets": stacked.unflatten(0, (scales, angles)),
            "_smooth_rows": _smoothing(height, down, scales),
            "_smooth_columns": _smoothing(width, across, scales),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a batch of images.

        Raises:
            ValueError: images of another shape than the settings say.
        """
        check_images(x, self.settings.shape)
        device = x.device.type
        # Sums in bfloat16 would lose digits. An export to ONNX has no form for what turns them off.
        is_mixed = torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if is_mixed else nullcontext():
            features = self._features(x[..., self._rows, self._columns])
        _, height, width = self.settings.feature_shape
        # An export keeps `x.shape[0]` open, not `len(x)`.
        size = (x.shape[0], x.shape[1], -1, height, width)
        reshaped = [feature.reshape(size) for feature in features]
        joined = torch.cat(reshaped, dim=2)
        return joined.flatten(1, 2)

    def _features(self, padded: Tensor) -> list[Tensor]:
        """Return the features of padded images, by path."""
        scales = self.settings.scales
        image = torch.fft.fft2(padded)
        features = [self._smooth(padded, 0)]
        for scale in range(scales):
            first = self._modulus(image, 0, scale)
            features.append(self._smooth(first, scale))
            if self.settings.order == 1 or scale == scales - 1:
                continue
            spectrum = torch.fft.fft2(first)
            for next_scale in range(scale + 1, scales):
                second = self._modulus(spectrum, scale, next_scale)
                features.append(self._smooth(second, next_scale))
        return features

    def _modulus(self, spectrum: Tensor, at: int, scale: int) -> Tensor:
        """Return |signal ∗ ψ(scale, θ)| for all θ.

        Args:
            spectrum: of signals `[..., H / 2^at, W / 2^at]`.
            at: the signals are read at every 2^at-th pixel of the padded image.
            scale: j of the wavelets; the results are read at every 2^j-th pixel.

        Returns:
            `[..., L, H / 2^j, W / 2^j]`.
        """
        wavelets = self._wavelets[scale]
        signals = _convolve(spectrum.unsqueeze(-3), wavelets, at, scale)
        # `abs` takes four times as long. Where nothing is left, the gradient is zero.
        squares = signals.real.square() + signals.imag.square()
        return squares.clamp_min(torch.finfo(squares.dtype).tiny).sqrt()

    def _smooth(self, signals: Tensor, at: int) -> Tensor:
        """Return signals smoothed by φ, read at every 2^J-th pixel, without the padding."""
        step = 2**at
        rows = self._smooth_rows[:, ::step].to(signals.dtype) * step
        columns = self._smooth_columns[:, ::step].to(signals.dtype) * step
        return rows @ (signals @ columns.T)


def _reflected_positions(side: int, step: int) -> Tensor:
    """Return which pixel of a side stands at each place of the padded side.

    The padding is at least one low-pass width before and after, and 2^J divides the padded side.
    """
    steps = math.ceil(side / step) + 1
    period = 2 * (side - 1)
    places = torch.arange(-step, steps * step)
    places = places.remainder(period)
    return torch.minimum(places, period - places)


def _smoothing(side: int, positions: int, scales: int) -> Tensor:
    """Return what each pixel of a padded side adds to each smoothed position, in float32.

    φ is a product of two Gaussians, one for a side.
    """
    sigma = _WIDTH * 2 ** (scales - 1)
    squares = _offsets(side) ** 2
    exponent = -squares / (2 * sigma**2)
    total = exponent.exp().sum(0)
    gaussian = total / (math.sqrt(2 * math.pi) * sigma)
    # The padding before the image is one position wide.
    centres = 2**scales * torch.arange(1, 1 + positions)
    distances = centres.unsqueeze(1) - torch.arange(side)
    return gaussian[distances.remainder(side)].float()


def _convolve(spectrum: Tensor, filters: Tensor, at: int, to: int) -> Tensor:
    """Return signals ∗ filters, read at every 2^to-th pixel of the padded image.

    Args:
        spectrum: of signals that are read at every 2^at-th pixel.
        filters: their spectra, for every pixel.
        at: as above.
        to: as above.
    """
    factor = 2 ** (to - at)
    # Subsampling by a factor divides the spectrum by its square.
    scaled = sum(_copies(filters, 2**at)) / factor**2
    pairs = zip(_copies(spectrum, factor), _copies(scaled, factor), strict=True)
    folded = sum(signal * filter_ for signal, filter_ in pairs)
    return torch.fft.ifft2(folded)


def _copies(spectrum: Tensor, factor: int) -> list[Tensor]:
    """Return the parts of a spectrum that one in `factor` positions cannot tell apart."""
    height, width = spectrum.shape[-2:]
    rows = spectrum.split(height // factor, -2)
    return [part for row in rows for part in row.split(width // factor, -1)]


def _spectrum(filter_: Tensor) -> Tensor:
    """Return the real spectrum of a filter that is symmetric about the origin, in float32."""
    spectrum = torch.fft.fft2(filter_)
    return spectrum.real.float()


def _offsets(size: int) -> Tensor:
    """Return distances of pixels and their periodic copies from the origin `[copies, size]`."""
    copies = torch.arange(-_PERIODS, _PERIODS + 1, dtype=torch.float64)
    starts = size * copies
    pixels = torch.arange(size)
    return starts.unsqueeze(1) + pixels


def _gabor(
    height: int, width: int, sigma: float, frequency: float, turn: float, slant: float
) -> Tensor:
    """Return a wave under a Gaussian, summed over the periods of the grid: complex `[H, W]`.

    At frequency 0 it is the Gaussian alone, a low-pass filter.
    """
    down = _offsets(height)[:, None, :, None]
    across = _offsets(width)[None, :, None, :]
    cosine = math.cos(turn)
    sine = math.sin(turn)
    u = across * cosine + down * sine
    v = down * cosine - across * sine
    slanted = slant * v
    distance = u**2 + slanted**2
    variance = sigma**2
    exponent = -distance / (2 * variance)
    envelope = exponent.exp()
    phase = 1j * frequency * u
    wave = phase.exp()
    product = envelope * wave
    total = product.sum(dim=(0, 1))
    area = 2 * math.pi * variance / slant
    return total / area


def _morlet(height: int, width: int, scale: int, angle: int, angles: int) -> Tensor:
    """Return a wavelet of mean zero: a wave less as much of its envelope as its mean asks."""
    sigma = _WIDTH * 2**scale
    frequency = _FREQUENCY / 2**scale
    turn = math.pi * angle / angles
    slant = 4 / angles
    wave = _gabor(height, width, sigma, frequency, turn, slant)
    envelope = _gabor(height, width, sigma, 0.0, turn, slant)
    share = wave.sum() / envelope.sum()
    mean = envelope * share
    return wave - mean
