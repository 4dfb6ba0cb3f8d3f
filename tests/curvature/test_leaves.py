import pytest
import torch
from torch.testing import assert_close

from dpkfc import DeadLeaves
from tests.models import stream


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 20), (2, 1, 9), (1, 8, 1)])
def test_every_example_has_the_mean_and_std_asked_for(shape):
    x, labels = DeadLeaves(shape, mean=0.3, std=2.0).sample(16, stream())
    assert labels is None and x.shape == (16, *shape) and x.dtype == torch.float32
    flat = x.double().flatten(1)
    assert flat.mean(1).tolist() == pytest.approx([0.3] * 16, abs=1e-5)
    std = flat.std(1, correction=0)
    # a leaf may cover all of a narrow image
    assert ((std - 2.0).abs() < 1e-4).logical_or(std < 1e-6).all()
    assert (std > 1).float().mean() > 0.4


def test_radii_follow_their_density():
    """With exponent 3 between a and b the share of radii below r is (a⁻² − r⁻²) / (a⁻² − b⁻²)."""
    probe = DeadLeaves((1, 40, 40), smallest=2.0, largest=0.5)
    radii = probe._radii(torch.linspace(0, 1, 1001, dtype=torch.float64))
    assert float(radii[0]) == pytest.approx(2.0) and float(radii[-1]) == pytest.approx(20.0)
    shares = (1 / 4 - radii**-2) / (1 / 4 - 1 / 400)
    assert_close(shares, torch.linspace(0, 1, 1001, dtype=torch.float64), atol=1e-9, rtol=0)


def test_a_pixel_has_the_level_of_the_last_leaf_that_lies_over_it():
    """Against a loop over pixels, from the same numbers."""
    n, leaves, height, width = 3, 6, 9, 11
    probe, numbers = DeadLeaves((2, height, width), leaves=leaves), stream(5)
    radius = probe._radii(torch.rand(leaves, n, generator=numbers, dtype=torch.float64))
    place = torch.rand(2, leaves, n, generator=numbers, dtype=torch.float64)
    level = torch.randn(leaves + 1, n, 2, generator=numbers, dtype=torch.float64)
    found, _ = probe.sample(n, stream(5))
    for i in range(n):
        image = level[0, i].view(2, 1, 1).repeat(1, height, width)
        for y in range(height):
            for x in range(width):
                for leaf in range(leaves):
                    r = radius[leaf, i]
                    down = place[0, leaf, i] * (height + 2 * r) - r - (y + 0.5)
                    across = place[1, leaf, i] * (width + 2 * r) - r - (x + 0.5)
                    if down**2 + across**2 <= r**2:
                        image[:, y, x] = level[leaf + 1, i]
        assert_close(found[i], ((image - image.mean()) / image.std(correction=0)).float())


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"shape": (28, 28)}, r"\(channels, height, width\), got \(28, 28\)"),
        ({"shape": (1, 0, 3)}, "shape"),
        ({"leaves": 0}, "leaves must be"),
        ({"size_exponent": 1.0}, "size_exponent must lie in"),
        ({"smallest": 0.0}, "smallest must lie in"),
        ({"smallest": 20.0}, "radii"),
        ({"largest": float("nan")}, "largest must"),
        ({"std": 0.0}, "std must be positive"),
        ({"channel_correlation": 1.5}, "channel_correlation"),
    ],
)
def test_settings_that_make_no_image_are_named(settings, what):
    with pytest.raises(ValueError, match=what):
        DeadLeaves(**{"shape": (1, 28, 28), **settings})
