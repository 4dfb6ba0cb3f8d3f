"""A floor that leaves few input directions above it: only those are turned to, and nothing else
changes.
"""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from dpkfc.curvature.fisher import clamp_eigenvalues
from dpkfc.gradients.clip import Clip
from dpkfc.gradients.clipped_summer import ClippedSummer
from dpkfc.gradients.discovery import find_layers
from dpkfc.linalg.blocks import Outer
from dpkfc.linalg.metric import Eigenbasis, Kronecker
from dpkfc.linalg.norms import per_example_norms
from tests.gradients.loop import record
from tests.models import randn
from tests.patching import patch_linalg


def basis(d):
    return torch.linalg.qr(randn(d, d)).Q


def entry(d_out, d_in, above, *, turned=True):
    """A clamped product with `above` input directions whose eigenvalues exceed the floor for some
    output.
    """
    torch.manual_seed(d_out + d_in)
    a = torch.cat(
        [
            torch.rand(above, dtype=torch.float64) * 50 + 20,
            torch.rand(d_in - above, dtype=torch.float64),
        ]
    )
    g = torch.rand(d_out, dtype=torch.float64) + 0.1
    whole = Eigenbasis(
        torch.ones(d_out, d_in, dtype=torch.float64), basis(d_in), basis(d_out) if turned else None
    )
    return clamp_eigenvalues(whole, {"A": a, "G": g}, 1.5, 0.5)


@pytest.mark.parametrize("above", [1, 5])
@pytest.mark.parametrize("turned", [True, False])
def test_it_is_the_same_map(above, turned):
    whole = entry(12, 40, above, turned=turned)
    few = whole.compact()
    assert (
        isinstance(few, Eigenbasis)
        and few.input.shape == (40, above)
        and few.scale.shape == (12, above)
    )
    g = randn(3, 12, 40)
    close = {"rtol": 1e-10, "atol": 1e-12}
    assert_close(few.apply(g), whole.apply(g), **close)
    assert_close(few.inverse().apply(few.apply(g)), g, **close)
    assert_close(few.scale_by(3.0).apply(g), 3 * whole.apply(g), **close)
    assert_close(few.variance(), whole.variance(), **close)
    assert_close(few.complete_basis().apply(g), whole.apply(g), **close)
    assert (
        few.operator_norm == whole.operator_norm
        and few.complete_basis().rest is None
        and whole.complete_basis() is whole
    )
    inside, outside = few.split_low_rank(g)
    squares = inside.square().sum((1, 2)) + outside.square().sum((1, 2))
    assert_close(squares, whole.apply(g).square().sum((1, 2)), **close)


def test_with_nothing_above_the_floor_it_is_a_number_and_with_much_it_stays_whole():
    none = entry(6, 20, 0).compact()
    assert isinstance(none, Kronecker)
    g = randn(6, 20)
    assert_close(none.apply(g), g / 1.5**0.5)
    most = entry(6, 20, 6)
    assert most.compact() is most
    plain = Eigenbasis(torch.rand(4, 5) + 1)
    assert plain.compact() is plain


def models():
    torch.manual_seed(3)
    return {
        "one position": (nn.Linear(40, 36), torch.randn(5, 40)),
        "positions, wide": (nn.Linear(40, 36), torch.randn(5, 7, 40)),
        "positions, narrow": (nn.Linear(40, 9), torch.randn(5, 7, 40)),
        "no bias": (nn.Linear(40, 36, bias=False), torch.randn(5, 7, 40)),
        "convolution": (nn.Conv2d(5, 8, 3, padding=1), torch.randn(5, 5, 6, 6)),
        "convolution, few positions": (nn.Conv2d(5, 8, 3), torch.randn(5, 5, 3, 3)),
        "grouped convolution": (nn.Conv2d(8, 8, 3, padding=1, groups=2), torch.randn(5, 8, 6, 6)),
    }


@pytest.mark.parametrize("case", models())
@pytest.mark.parametrize("gram", [False, True])
def test_norms_and_clipped_sums_are_those_of_the_whole_basis(case, gram, monkeypatch):
    if gram:
        patch_linalg(monkeypatch, "is_materialised", lambda *_: False)
    layer, x = models()[case]
    model, x = nn.Sequential(layer, nn.Tanh()).double(), x.double()
    (found,) = find_layers(model)
    groups = getattr(layer, "groups", 1)
    d_in = layer.weight[0].numel() + (layer.bias is not None)
    whole = entry(layer.weight.shape[0] // groups, d_in, 3)
    results = []
    for metric in (whole, whole.compact()):
        summer = ClippedSummer([found], {"0": metric}, Clip(0.7))
        results.append(
            (
                summer.add(record(model, [found], lambda: model(x).square().flatten(1).sum(1)), 5),
                summer.result(),
            )
        )
    (norms, sums), (few_norms, few_sums) = results
    assert_close(few_norms, norms, rtol=1e-8, atol=0)
    for name, value in sums.items():
        assert_close(few_sums[name], value, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 40, 36), (7, 40, 36), (7, 40, 9), (30, 100, 80)])
@pytest.mark.parametrize("cancels", [False, True])
def test_norms_in_float32_are_upper_bounds_and_near(shape, cancels):
    t, d_in, d_out = shape
    whole = entry(d_out, d_in, 4).compact()
    metric = Eigenbasis(whole.scale.float(), whole.input.float(), whole.output.float(), whole.rest)
    generator = torch.Generator().manual_seed(t)
    a, b = (
        torch.randn(6, t, d_in, generator=generator),
        torch.randn(6, t, d_out, generator=generator),
    )
    if cancels and t > 1:
        a[:, 0], b[:, 0] = -1000 * a[:, 1], b[:, 1]
        a[:, 1] *= 1000
    exact = metric.scale_by(1.0)
    exact = Eigenbasis(
        exact.scale.double(), exact.input.double(), exact.output.double(), exact.rest
    )
    expected = torch.linalg.vector_norm(exact.apply(b.double().mT @ a.double()).flatten(1), dim=1)
    norms = per_example_norms(Outer(a, b), metric).norms
    assert bool((norms >= expected).all())
    if not cancels:
        assert bool((norms <= expected * 1.01).all())
