"""The encoder that comes with the package, and the maps that stand beside each other."""

import errno
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.testing import assert_close

from dpkfc.curvature import DeadLeaves, PublicData
from dpkfc.features import (
    FeaturesOf,
    JoinedFeatures,
    Scattering,
    SyntheticEncoder,
    SyntheticImages,
    encoder,
    joined,
)
from dpkfc.features.joined import ENERGY
from tests.gradients.loop import assert_equals_a_loop
from tests.sessions import cross_entropy

SHAPE = (1, 16, 16)


def images(n, shape=SHAPE):
    return 2 * torch.rand(n, *shape, generator=torch.Generator().manual_seed(3)) - 1


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 9, 13)])
def test_features_of_an_image_depend_on_that_image_alone(shape):
    settings = SyntheticEncoder(shape)
    module = settings.build()
    module.train()
    x = images(3, shape)
    found = module(x)
    assert found.shape == (3, *settings.feature_shape)
    alone = torch.cat([module(row[None]) for row in x])
    assert_close(found, alone, rtol=1e-4, atol=1e-5)
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_a_grey_image_is_one_of_three_equal_channels():
    x = images(2)
    grey = SyntheticEncoder(SHAPE).build()(x)
    colour = SyntheticEncoder((3, 16, 16)).build()(x.expand(-1, 3, -1, -1))
    assert_close(grey, colour)


def test_a_pool_averages_the_positions():
    x = images(2, (3, 32, 32))
    fine = SyntheticEncoder((3, 32, 32), pool=8).build()(x)
    coarse = SyntheticEncoder((3, 32, 32), pool=2).build()(x)
    assert_close(fine.unflatten(3, (2, 4)).unflatten(2, (2, 4)).mean((3, 5)), coarse)


def test_the_encoder_is_a_function_that_gradients_pass():
    x = images(1).requires_grad_()
    SyntheticEncoder(SHAPE).build()(x).sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shape": (2, 16, 16)}, "1 or 3"),
        ({"shape": (3, 7, 16)}, "sides of 8"),
        ({"shape": SHAPE, "pool": 5}, "pool must lie in \\[1, 4\\]"),
        ({"shape": SHAPE, "pool": 2.5}, "pool must be an integer >= 1, got 2.5"),
    ],
)
def test_settings_that_fit_no_image_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SyntheticEncoder(**settings)


def test_images_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"for images of shape \(1, 16, 16\), got \(1, 20, 16\)"):
        SyntheticEncoder(SHAPE).build()(images(1, (1, 20, 16)))


def test_a_changed_or_unreadable_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match="cannot be read"):
        SyntheticEncoder(SHAPE, weights=str(tmp_path / "junk.safetensors")).build()
    monkeypatch.setattr(encoder, "CHECKSUM", "0" * 64)
    with pytest.raises(ValueError, match="another checksum"):
        SyntheticEncoder(SHAPE).build()


def test_own_weights_are_taken(tmp_path):
    torch.manual_seed(0)
    other = encoder.Encoder()
    save_file(other.state_dict(), tmp_path / "own.safetensors")
    found = SyntheticEncoder(SHAPE, weights=str(tmp_path / "own.safetensors")).build()
    assert_close(found.encoder.stem.weight, other.stem.weight)


# -- maps beside each other ------------------------------------------------------------------------


@pytest.mark.slow
def test_every_map_has_the_same_energy():
    settings = JoinedFeatures((Scattering(SHAPE), SyntheticEncoder(SHAPE)), size=400)
    inputs, _ = SyntheticImages(SHAPE).sample(400, torch.Generator().manual_seed(0))
    found = settings.build()(inputs)
    first = math.prod(Scattering(SHAPE).feature_shape)
    assert found.shape == (400, *settings.feature_shape)
    for part in (found[:, :first], found[:, first:]):
        assert float(part.square().sum(1).mean()) == pytest.approx(ENERGY / 2, rel=0.2)


def test_maps_of_different_images_are_refused():
    with pytest.raises(ValueError, match="images of one shape"):
        JoinedFeatures((Scattering((1, 16, 16)), SyntheticEncoder((1, 20, 20))))


def test_the_probe_of_a_head_is_the_images_through_the_features():
    settings = JoinedFeatures((Scattering(SHAPE),), probe=DeadLeaves(SHAPE), size=50)
    module = settings.build()
    found, labels = FeaturesOf(settings, DeadLeaves(SHAPE)).sample(
        7, torch.Generator().manual_seed(1)
    )
    inputs, _ = DeadLeaves(SHAPE).sample(7, torch.Generator().manual_seed(1))
    assert labels is None and torch.equal(found, module(inputs))


def test_scales_of_private_data_are_refused():
    class Private(PublicData):
        def describe(self):
            return {**super().describe(), "uses_private_data": True}

    probe = Private(images(4), provenance="patients")
    with pytest.raises(ValueError, match="holds private data"):
        JoinedFeatures((Scattering(SHAPE),), probe=probe).build()


def test_an_image_that_is_not_finite_changes_no_other():
    module = JoinedFeatures((Scattering(SHAPE), SyntheticEncoder(SHAPE)), size=20).build()
    x = images(3)
    clean = module(x)
    x[1] = math.nan
    found = module(x)
    assert_close(found[[0, 2]], clean[[0, 2]])
    assert isinstance(module, nn.Module) and not list(module.parameters())[0].requires_grad


@pytest.mark.quick("2-5")
@pytest.mark.parametrize(("blocks", "convolutions"), [(1, 2), (2, 5), (6, 16)])
def test_the_last_blocks_train_and_their_gradients_are_those_of_single_examples(
    blocks, convolutions
):
    features = JoinedFeatures((SyntheticEncoder(SHAPE),), size=50).build()
    features.parts[0].features.unfreeze(blocks)
    model = nn.Sequential(features, nn.Linear(1024, 3)).double()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == convolutions + 2
    batch = (images(3).double(), torch.tensor([0, 1, 2]))
    assert_equals_a_loop(model, batch, cross_entropy)


@pytest.mark.parametrize("blocks", [0, 7, 1.5, True])
def test_another_number_of_blocks_is_refused(blocks):
    with pytest.raises(ValueError, match=r"unfreeze: blocks must (lie in|be an integer)"):
        SyntheticEncoder(SHAPE).build().unfreeze(blocks)


def test_scales_are_measured_once_a_machine_and_not_for_given_images(tmp_path, monkeypatch):
    monkeypatch.setenv("DPKFC_CACHE", str(tmp_path / "cache"))
    settings = JoinedFeatures((Scattering(SHAPE),), size=10)
    x = images(2)
    first = settings.build()(x)
    (file,) = (tmp_path / "cache").iterdir()

    def refuse(*_, **__):
        raise LookupError

    with monkeypatch.context() as patched:
        patched.setattr(joined, "standardise", refuse)
        assert torch.equal(settings.build()(x), first)
        for other in (replace(settings, size=11), replace(settings, probe=DeadLeaves(SHAPE))):
            with pytest.raises(LookupError):
                other.build()
        # Of another version.
        patched.setattr(torch, "__version__", "0.0")
        with pytest.raises(LookupError):
            settings.build()
    file.write_bytes(file.read_bytes()[:-8])
    assert torch.equal(settings.build()(x), first)
    file.unlink()

    def is_full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dpkfc.checkpoint._write_synced", is_full)
    assert torch.equal(settings.build()(x), first) and not list(file.parent.iterdir())
