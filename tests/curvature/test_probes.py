import json

import pytest
import torch

from dpkfc.curvature.model_inputs import call
from dpkfc.curvature.noise_probes import DeadLeaves, FeatureNoise, PinkNoise, WhiteNoise
from dpkfc.curvature.probes import Probe, PublicData
from dpkfc.curvature.token_noise import TokenNoise
from tests.models import stream


def _power_slope(x):
    """Least-squares slope of log power against log radial frequency, the zero frequency left
    out.
    """
    axes = tuple(range(2, x.dim()))
    power = torch.fft.fftn(x.double(), dim=axes).abs().square().mean((0, 1)).flatten()
    grids = torch.meshgrid(
        *[torch.fft.fftfreq(n, dtype=torch.float64) for n in x.shape[2:]], indexing="ij"
    )
    radius = torch.stack([g.square() for g in grids]).sum(0).sqrt().flatten()
    f, p = radius[radius > 0].log(), power[radius > 0].log()
    f = f - f.mean()
    return float((f * (p - p.mean())).sum() / f.square().sum())


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 20, 48), (2, 33, 17), (1, 256), (1, 8, 12, 10)])
@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_the_power_falls_with_the_exponent_that_was_asked_for(shape, exponent):
    x, labels = PinkNoise(shape, power_exponent=exponent).sample(200, stream())
    assert labels is None and x.shape == (200, *shape) and x.dtype == torch.float32
    assert _power_slope(x) == pytest.approx(-exponent, abs=0.06)


@pytest.mark.parametrize("exponent", [-1.0, 0.0, 1.0, 3.0, 400.0])
def test_every_example_has_the_mean_and_std_asked_for(exponent):
    x, _ = PinkNoise((2, 9, 14), power_exponent=exponent, mean=0.3, std=2.0).sample(16, stream())
    flat = x.double().flatten(1)
    assert torch.isfinite(flat).all()
    assert flat.mean(1).tolist() == pytest.approx([0.3] * 16, abs=1e-5)
    assert flat.std(1, correction=0).tolist() == pytest.approx([2.0] * 16, rel=1e-5)


def test_the_zero_frequency_is_as_strong_as_the_lowest_wave():
    """With many channels standardisation leaves the channel means alone: their power is that of the
    slowest wave.
    """
    x, _ = PinkNoise((64, 16, 16), power_exponent=1.0).sample(64, stream())
    power = torch.fft.fftn(x.double(), dim=(2, 3)).abs().square().mean((0, 1))
    assert float(power[0, 0] / power[0, 1]) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("correlation", [0.0, 0.6, 1.0])
def test_channels_are_correlated_as_asked(correlation):
    x, _ = PinkNoise((2, 24, 24), power_exponent=0.0, channel_correlation=correlation).sample(
        64, stream()
    )
    first, second = x[:, 0].flatten(), x[:, 1].flatten()
    assert float(torch.corrcoef(torch.stack([first, second]))[0, 1]) == pytest.approx(
        correlation, abs=0.02
    )


def _rows(inputs):
    return inputs if isinstance(inputs, torch.Tensor) else inputs["input_ids"]


PROBES = [
    PinkNoise((1, 6, 4)),
    WhiteNoise((3, 2), std=0.5),
    FeatureNoise(7, density=0.3),
    PublicData(torch.arange(12.0).view(6, 2), torch.arange(6), provenance="a test"),
    DeadLeaves((1, 8, 8), leaves=5),
    TokenNoise(30, 9, cls_id=1, sep_id=2, pad_id=0, bare=True),
    TokenNoise(30, 9, frequencies=torch.ones(30), provenance="here", pad_id=0),
]


@pytest.mark.parametrize("probe", PROBES, ids=repr)
def test_a_probe_is_repeatable_describable_and_leaves_the_global_stream_alone(probe):
    assert isinstance(probe, Probe)
    before = torch.random.get_rng_state()
    first, second, other = (_rows(probe.sample(5, stream(seed))[0]) for seed in (3, 3, 4))
    assert torch.equal(first, second) and first.shape[0] == 5 and first.device.type == "cpu"
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())
    description = json.loads(json.dumps(probe.describe()))
    assert description["kind"] == type(probe).__name__
    assert description["source"] == ("public" if "provenance" in description else "synthetic")
    assert probe == probe and hash(probe) == hash(probe)
    assert probe not in [x for x in PROBES if x is not probe]


def test_white_and_feature_noise_have_their_moments():
    x = WhiteNoise((10, 10), mean=1.0, std=3.0).sample(200, stream())[0]
    assert float(x.mean()) == pytest.approx(1.0, abs=0.1) and float(x.std()) == pytest.approx(
        3.0, abs=0.1
    )
    v = FeatureNoise(50, std=2.0, density=0.25).sample(400, stream())[0]
    assert float((v != 0).float().mean()) == pytest.approx(0.25, abs=0.02)
    assert float(v[v != 0].std()) == pytest.approx(2.0, abs=0.1)


def test_public_data_keeps_labels_with_inputs_and_draws_without_replacement_while_it_can():
    inputs, labels = torch.arange(10).view(10, 1), torch.arange(10)
    probe = PublicData(inputs, labels, provenance="a test")
    x, y = probe.sample(10, stream())
    assert torch.equal(x[:, 0], y) and sorted(y.tolist()) == list(range(10))
    x, y = probe.sample(37, stream())
    assert x.shape == (37, 1) and torch.equal(x[:, 0], y)


def test_public_data_is_known_by_its_contents():
    inputs = torch.randn(4, 3)
    one = PublicData(inputs, provenance="here")
    same = PublicData(inputs.clone(), provenance="here")
    other = PublicData(inputs + 1, provenance="here")
    assert one == same and hash(one) == hash(same) and one != other
    assert one.describe()["sha256"] == same.describe()["sha256"] != other.describe()["sha256"]
    assert one != PublicData(inputs, torch.zeros(4), provenance="here")
    assert one.describe()["shape"] == [3] and one.describe()["examples"] == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PinkNoise((32,)), "channels"),
        (lambda: PinkNoise((1, 8, 8), power_exponent=float("nan")), "power_exponent"),
        (lambda: PinkNoise((1, 8, 8), std=0.0), "std"),
        (lambda: PinkNoise((1, 8, 8), channel_correlation=1.5), "channel_correlation"),
        (lambda: WhiteNoise((0, 3)), "shape"),
        (lambda: WhiteNoise((3,), mean=float("inf")), "mean"),
        (lambda: FeatureNoise(0), "FeatureNoise: dim"),
        (lambda: FeatureNoise(3, density=0.0), "density"),
        (lambda: PublicData(torch.ones(2, 2)), "provenance"),
        (lambda: PublicData(torch.ones(2, 2), torch.ones(3), provenance="x"), "labels"),
        (lambda: PublicData(torch.tensor([[float("nan")]]), provenance="x"), "NaN"),
        (lambda: PublicData(torch.ones(0, 2), provenance="x"), "at least one"),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_more_than_ten_inputs_keep_their_order():
    columns = tuple(torch.full((3, 1), float(i)) for i in range(11))
    inputs, _ = PublicData(columns, provenance="here").sample(2, torch.Generator())

    class Sum(torch.nn.Module):
        def forward(self, *x):
            return [float(column[0]) for column in x]

    assert call(Sum(), inputs) == [float(i) for i in range(11)]
