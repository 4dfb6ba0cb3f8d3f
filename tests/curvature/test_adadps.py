"""AdaDPS against its formula on formed gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from dpkfc.curvature import AdaDPS, FeatureNoise, PinkNoise, PublicData
from dpkfc.curvature.base import PreconditionerState
from dpkfc.curvature.probe_pass import public_generator
from dpkfc.linalg.metric import Eigenbasis, Elementwise
from tests.curvature.toys import CNN_SHAPE, Text, capture, cnn, mlp, rules_of


def public(n=40, d=12, classes=4):
    torch.manual_seed(5)
    return PublicData(torch.randn(n, d), torch.randint(classes, (n,)), provenance="random rows")


def ada(**settings):
    return AdaDPS(**{"probe": public(), "batch_size": 10, **settings})


def net():
    torch.manual_seed(0)
    return mlp().double()


def moments_by_autograd(config, model, step=0):
    """Mean over mini-batches of the squared gradient of the mean loss, by plain autograd on the
    probe's own labels.
    """
    run = config.probe_spec(step)
    x, y = run.probe.sample(run.size, public_generator(run.seed, step))
    parameters, found = dict(model.named_parameters()), []
    for rows in torch.arange(run.size).split(run.within):
        loss = F.cross_entropy(model(x[rows].double()), y[rows])
        found.append([g.square() for g in torch.autograd.grad(loss, list(parameters.values()))])
    return {name: torch.stack([f[i] for f in found]).mean(0) for i, name in enumerate(parameters)}


def matrix(v, layer):
    return torch.cat([v[f"{layer}.weight"], v[f"{layer}.bias"].unsqueeze(1)], 1)


@pytest.mark.parametrize("chunk", [64, 7])
@pytest.mark.parametrize("batch_size", [10, 40, None, 15])
def test_the_metric_is_the_formula(batch_size, chunk):
    model, config = net(), ada(batch_size=batch_size, chunk=chunk, scale="raw")
    built = config.build(model, capture, 0, rules_of(model))
    v = moments_by_autograd(config, model)
    assert config.probe_spec(0).size == {10: 40, 40: 40, None: 40, 15: 30}[batch_size]
    shift = 1e-3 * float(torch.cat([x.flatten() for x in v.values()]).mean())
    for layer in ("0", "2"):
        entry = built.metric[layer]
        assert isinstance(entry, Eigenbasis) and entry.input is None and entry.output is None
        assert_close(entry.scale, 1 / (matrix(v, layer) + shift).sqrt(), rtol=1e-9, atol=0)


def test_a_model_of_one_number_has_the_mean_of_that_number():
    """1/√(v + ε v), with v the square of the mean gradient of two examples."""
    probe = PublicData(torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1), provenance="two rows")
    config = AdaDPS(probe=probe, batch_size=2, scale="raw", likelihood="gaussian")
    model = torch.nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(0.5)
    scale = config.build(model, capture, 0).metric[""].scale
    v = ((1 * 0.5 + 3 * 1.5) / 2) ** 2
    exact = torch.tensor([[(v * 1.001) ** -0.5]], dtype=torch.float64)
    assert_close(scale, exact, rtol=1e-9, atol=0)


def test_entries_without_a_gradient_stay_bounded():
    """A dead input column has v = 0: 1/√ε of the relative floor, not 1e5."""
    x = torch.randn(40, 12)
    x[:, 3] = 0
    probe = PublicData(x, torch.randint(4, (40,)), provenance="a dead column")
    model = net()
    scale = ada(probe=probe, scale="raw").build(model, capture, 0).metric["0"].scale
    assert float(scale[:, 3].max() / scale.median()) < 100
    rows = ada(probe=probe).build(model, capture, 0).report
    assert "without a gradient" in rows[0]["note"]


def test_refreshes():
    assert [s for s in range(9) if ada(every=4).is_due(s)] == [0, 4, 8]


def test_pink_noise_draws_its_labels_and_every_kind_of_layer_is_covered():
    config = AdaDPS(probe=PinkNoise(CNN_SHAPE), probe_size=40)
    assert config.describe()["labels"] == "model" and ada().describe()["labels"] == "given"
    model = cnn(groups=2).double()
    built = config.build(model, capture, 0, rules_of(model))
    assert built.metric["2"].scale.shape == (3, 18)
    text = Text().double()
    built = AdaDPS(probe=PublicData(torch.randint(11, (40, 5)), provenance="ids")).build(
        text, capture, 0, rules_of(text)
    )
    assert isinstance(built.metric["norm"], Elementwise) and built.metric[
        "embedding"
    ].scale.shape == (6, 11)
    again = PreconditionerState.from_state_dict(built.state_dict())
    assert again.digest == built.digest


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer"),
        ({"floor": 0.0}, "floor must be positive"),
        ({"every": 0}, "every must be an integer"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ada(**settings)


def test_a_probe_without_any_gradient_is_refused():
    model = net()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()

    def flat(output, generator):
        return 0 * output.sum(1)

    with pytest.raises(ValueError, match="no parameter has a gradient"):
        AdaDPS(probe=FeatureNoise(12), probe_size=8, batch_size=4, loss=flat).build(
            model, capture, 0
        )
