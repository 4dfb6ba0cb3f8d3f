"""Layers whose weight is computed run again for each example: equal to a loop in every metric and
grouping.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.testing import assert_close

from dpkfc.data.loading import layout
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.evaluation_points import EvaluationPoint
from dpkfc_papers.recipes.networks import WeightStandardisation, standardised_conv
from tests.gradients.cases import loss_fn, sum_examples
from tests.gradients.loop import assert_equals_a_loop


class Exponential(nn.Module):
    """With a parameter of its own and a constant buffer."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("shift", torch.tensor(0.2))

    def forward(self, x):
        return torch.exp(self.rate * x) - self.shift


def add_parametrization(module, *names):
    for name in names:
        parametrize.register_parametrization(module, name, Exponential())
    return module


def frozen(module, *names):
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


ORIGINAL, RATE = "parametrizations.weight.original", "parametrizations.weight.0.rate"
CASES = {
    "linear": lambda: add_parametrization(nn.Linear(6, 4), "weight"),
    "linear without bias": lambda: add_parametrization(nn.Linear(6, 4, bias=False), "weight"),
    "bias alone is computed": lambda: add_parametrization(nn.Linear(6, 4), "bias"),
    "both": lambda: add_parametrization(nn.Conv2d(3, 4, 3), "weight", "bias"),
    "conv": lambda: add_parametrization(nn.Conv2d(3, 4, 3, padding=1), "weight"),
    "grouped conv": lambda: add_parametrization(nn.Conv2d(3, 6, 3, groups=3, stride=2), "weight"),
    "reflected": lambda: add_parametrization(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect", bias=False), "weight"
    ),
    "original frozen": lambda: frozen(add_parametrization(nn.Conv2d(3, 4, 3), "weight"), ORIGINAL),
    "own parameter frozen": lambda: frozen(add_parametrization(nn.Linear(6, 4), "weight"), RATE),
    "only the bias trains": lambda: frozen(
        add_parametrization(nn.Conv2d(3, 4, 3), "weight"), ORIGINAL, RATE
    ),
    "only the weight trains": lambda: frozen(
        add_parametrization(nn.Linear(6, 4), "weight"), "bias"
    ),
    "standardised": lambda: standardised_conv(3, 4, 3),
}
X = (6, 3, 6, 6)


class Twice(nn.Module):
    """The layer between two others, called once or twice."""

    def __init__(self, inner, times):
        super().__init__()
        self.first, self.inner, self.times = nn.Conv2d(3, 3, 1), inner, times
        self.head = nn.LazyLinear(3)

    def forward(self, x):
        parts = [
            self.inner(torch.tanh(self.first(x * scale))) for scale in range(1, self.times + 1)
        ]
        return self.head(sum(parts).flatten(1).tanh())


def build(case, times=1):
    model = Twice(CASES[case](), times)
    model(torch.randn(X))
    return model.double(), (torch.randn(X, dtype=torch.float64), torch.randint(0, 3, X[:1]))


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("case", sorted(CASES))
def test_equals_a_loop(case, times):
    model, batch = build(case, times)
    assert {layer.name: layer.rule for layer in find_layers(model)}["inner"] == "fallback"
    assert_equals_a_loop(model, batch, loss_fn)


@pytest.mark.parametrize("case", ["linear", "both", "standardised"])
def test_units_and_points_equal_autograd(case):
    """Two records a unit, at two values of the parameters."""
    model, (x, y) = build(case)
    elsewhere = {n: p.detach() + 0.1 for n, p in model.named_parameters()}
    rows = torch.arange(6).view(3, 2).numpy()
    (part,) = layout(rows, reduction="sum")
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    points = [EvaluationPoint(weight=1.5), EvaluationPoint(elsewhere, -0.5)]
    total, norms = sum_examples(model, (x, y), 0.5, parts=[part], points=points)
    assert all(torch.equal(p, values[n]) for n, p in model.named_parameters())
    found = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for i, own in enumerate(rows):
        grads = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        for point, weight in ((values, 1.5), (elsewhere, -0.5)):
            leaves = {n: p.clone().requires_grad_() for n, p in point.items()}
            logits = torch.func.functional_call(model, leaves, (x[own],))
            loss = (F.cross_entropy(logits, y[own], reduction="none") * 2).sum()
            for name, g in zip(
                leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True
            ):
                grads[name] = grads[name] + weight * g
        norm = float(torch.sqrt(sum(g.square().sum() for g in grads.values())))
        assert float(norms[i]) == pytest.approx(norm, rel=1e-6)
        found = {n: t + grads[n] * min(1.0, 0.5 / norm) for n, t in found.items()}
    for name, value in found.items():
        assert_close(total[name], value, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def test_standardised_filters():
    """Against the formula, filter by filter; a filter without variance is scaled by the floor."""
    standardise = WeightStandardisation(3)
    with torch.no_grad():
        standardise.gain.copy_(torch.tensor([1.0, 2.0, 3.0]))
    weight = torch.randn(3, 4, 2, 2)
    weight[2] = 0.5
    found = standardise(weight)
    for i, gain in enumerate((1.0, 2.0)):
        own = weight[i]
        expected = gain * (own - own.mean()) / torch.sqrt(own.var(correction=0) * 16)
        assert_close(found[i], expected)
        assert float(found[i].square().sum()) == pytest.approx(gain**2, rel=1e-5)
    assert bool((found[2] == 0).all())
    small = 1e-3 * torch.randn(3, 4, 2, 2)
    assert_close(standardise(small)[0], (small[0] - small[0].mean()) / 1e-2)
    conv = standardised_conv(4, 8, 3)
    assert conv.bias is not None and float(conv.bias.abs().max()) == 0
    assert set(dict(conv.named_parameters())) == {
        "bias",
        ORIGINAL,
        "parametrizations.weight.0.gain",
    }


@pytest.mark.parametrize("function", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_a_spectral_norm_that_moves_in_every_pass_is_refused(function):
    model = nn.Sequential(nn.Linear(3, 6), function(nn.Linear(6, 4)))
    with pytest.raises(
        ValueError, match=r"module '1.*power iteration in every forward pass.*eval"
    ) as caught:
        find_layers(model)
    assert len(str(caught.value)) <= 160
    find_layers(model.eval())


def test_a_spectral_norm_of_a_vector_has_nothing_that_moves():
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 4), "bias"))
    assert [layer.rule for layer in find_layers(model)] == ["fallback"]
