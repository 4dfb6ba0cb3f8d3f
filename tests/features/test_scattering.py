"""Scattering against direct sums in space, and scales that see no private data."""

import math

import numpy as np
import pytest
import torch

from dpkfc.curvature import DeadLeaves, PublicData, WhiteNoise
from dpkfc.features import Scattering, standardise


def wave(height, width, sigma, frequency, turn, slant):
    """A wave under a Gaussian, summed over copies of the grid, position by position."""
    values = torch.zeros(height, width, dtype=torch.complex128)
    for y in range(height):
        for x in range(width):
            total = 0j
            for up in range(-2, 3):
                for right in range(-2, 3):
                    v, u = y + up * height, x + right * width
                    along = u * math.cos(turn) + v * math.sin(turn)
                    across = v * math.cos(turn) - u * math.sin(turn)
                    size = math.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
                    total += size * complex(
                        math.cos(frequency * along), math.sin(frequency * along)
                    )
            values[y, x] = total / (2 * math.pi * sigma**2 / slant)
    return values


def morlet(height, width, scale, angle, angles):
    arguments = (math.pi * angle / angles, 4 / angles)
    sigma, frequency = 0.8 * 2**scale, 3 * math.pi / 4 / 2**scale
    filter_ = wave(height, width, sigma, frequency, *arguments)
    envelope = wave(height, width, sigma, 0.0, *arguments)
    return filter_ - envelope * (filter_.sum() / envelope.sum())


def convolve(signal, filter_):
    """A circular convolution as a sum over all pairs of positions."""
    height, width = signal.shape
    result = torch.zeros(height, width, dtype=torch.complex128)
    for y in range(height):
        for x in range(width):
            rows = (y - torch.arange(height)) % height
            columns = (x - torch.arange(width)) % width
            result[y, x] = (signal * filter_[rows][:, columns]).sum()
    return result


def scatter(image, scales, angles, order):
    """The features of one channel [H, W], by sums alone."""
    step = 2**scales
    height, width = image.shape
    wholes = [(math.ceil(side / step) + 2) * step for side in (height, width)]
    margins = [(step, wholes[0] - height - step), (step, wholes[1] - width - step)]
    # NumPy reflects again where the padding is wider than the image.
    padded = torch.from_numpy(np.pad(image.numpy(), margins, mode="reflect"))

    def sampled(filter_, at):
        return filter_[:: 2**at, :: 2**at] * 4**at

    def smooth(signal, at):
        low_pass = wave(*wholes, 0.8 * 2 ** (scales - 1), 0.0, 0.0, 1.0)
        result = convolve(signal.to(torch.complex128), sampled(low_pass, at)).real
        result = result[:: step // 2**at, :: step // 2**at]
        return result[1 : 1 + height // step, 1 : 1 + width // step]

    def modulus(signal, scale, at, angle):
        filter_ = sampled(morlet(*wholes, scale, angle, angles), at)
        result = convolve(signal.to(torch.complex128), filter_).abs()
        return result[:: 2 ** (scale - at), :: 2 ** (scale - at)]

    features = [smooth(padded, 0)]
    for scale in range(scales):
        firsts = [modulus(padded, scale, 0, angle) for angle in range(angles)]
        features += [smooth(first, scale) for first in firsts]
        if order == 1:
            continue
        for later in range(scale + 1, scales):
            for first in firsts:
                for angle in range(angles):
                    features.append(smooth(modulus(first, later, scale, angle), later))
    return torch.stack(features)


@pytest.mark.quick("shape1-*")
@pytest.mark.parametrize(
    ("shape", "scales", "angles", "order"),
    [((2, 9, 8), 2, 2, 2), ((1, 8, 11), 1, 3, 2), ((1, 8, 8), 2, 2, 1), ((1, 9, 5), 2, 1, 2)],
)
def test_features_are_the_sums_written_out(shape, scales, angles, order):
    settings = Scattering(shape, scales=scales, angles=angles, order=order)
    x = torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    features = settings.build()(x)
    assert features.shape == (2, *settings.feature_shape)
    for example, found in zip(x, features, strict=True):
        expected = torch.cat([scatter(image, scales, angles, order) for image in example])
        assert torch.allclose(found, expected, atol=1e-6)


def test_sums_stay_in_float32_beside_an_encoder_in_bfloat16():
    transform = Scattering((1, 28, 28)).build()
    x = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(2))
    with torch.autocast("cpu", torch.bfloat16):
        features = transform(x)
    assert features.dtype == torch.float32
    assert torch.allclose(features.double(), transform(x.double()), atol=1e-6)


def test_an_export_has_plain_operations_alone():
    transform = Scattering((1, 8, 8), angles=1).build()
    program = torch.export.export(transform, (torch.zeros(2, 1, 8, 8),), strict=False)
    assert not [node for node in program.graph.nodes if "autocast" in str(node.target).lower()]


def test_a_black_image_has_a_gradient():
    x = torch.zeros(1, 1, 8, 8, requires_grad=True)
    Scattering((1, 8, 8)).build()(x).sum().backward()
    assert x.grad.isfinite().all() and x.grad.any()


def test_features_are_differentiable_and_have_no_parameters():
    transform = Scattering((1, 8, 8)).build()
    assert not list(transform.parameters())
    x = torch.randn(1, 1, 8, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(transform, (x,), atol=1e-4, eps=1e-5)


def test_a_constant_image_has_no_waves():
    features = Scattering((1, 28, 28)).build()(torch.full((1, 1, 28, 28), 3.0))
    assert torch.allclose(features[:, 0], torch.tensor(3.0), atol=1e-4)
    assert features[:, 1:].abs().max() < 1e-4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (28, 28)}, "shape must be"),
        ({"shape": (1, 28, 28), "scales": 0}, "scales must be an integer >= 1"),
        ({"shape": (1, 28, 28), "order": 3}, "order must be one of 1, 2"),
        ({"shape": (1, 3, 28)}, "need images of 4 pixels"),
    ],
)
def test_wrong_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Scattering(**arguments)


def test_images_of_another_shape_are_named():
    with pytest.raises(ValueError, match=r"shape \(1, 28, 28\), got \(3, 28, 28\)"):
        Scattering((1, 28, 28)).build()(torch.zeros(1, 3, 28, 28))


def test_scales_are_mean_and_deviation_over_the_probe():
    probe = DeadLeaves((1, 8, 8))
    transform = Scattering((1, 8, 8), angles=2).build()
    scaled = standardise(transform, probe, size=300, seed=3)
    generator = torch.Generator().manual_seed(3)
    inputs = torch.cat([probe.sample(n, generator)[0] for n in (50,) * 6])
    features = transform(inputs).double().transpose(0, 1).flatten(1)
    assert torch.allclose(scaled.mean.double(), features.mean(1), atol=1e-6)
    assert torch.allclose(scaled.deviation.double(), features.std(1, correction=0), rtol=1e-4)
    values = scaled(inputs).transpose(0, 1).flatten(1)
    assert values.mean(1).abs().max() < 1e-4
    assert scaled.origin == {"probe": probe.describe(), "size": 300, "seed": 3}
    again = standardise(transform, probe, size=300, seed=3)
    assert torch.equal(again.mean, scaled.mean)


def test_a_constant_channel_keeps_its_scale():
    class Constant(torch.nn.Module):
        def forward(self, x):
            return torch.cat([x, torch.full_like(x, 2.0)], 1)

    scaled = standardise(Constant(), WhiteNoise((1, 4, 4)), size=10)
    assert scaled.deviation[1] == 1.0 and scaled.mean[1] == 2.0


def test_private_data_and_moving_features_are_refused():
    transform = Scattering((1, 8, 8)).build()
    with pytest.raises(ValueError, match="scales of private data would leak"):
        standardise(transform, torch.zeros(10, 1, 8, 8))
    with pytest.raises(ValueError, match="parameters that train"):
        standardise(torch.nn.Conv2d(1, 2, 3), DeadLeaves((1, 8, 8)))
    with pytest.raises(ValueError, match="size must be an integer >= 2"):
        standardise(transform, DeadLeaves((1, 8, 8)), size=1)
    public = PublicData(torch.rand(20, 1, 8, 8), provenance="drawn here")
    assert standardise(transform, public, size=20).origin["probe"]["provenance"] == "drawn here"
