"""Patches of convolutions that are formed when asked for give the factors and norms of those that
are all written out.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from dpkfc.curvature import row_sampling
from dpkfc.curvature.layer_factors import FactorOptions, LayerAccumulator
from dpkfc.curvature.metric_scale import layer_norms, probe_norms
from dpkfc.curvature.row_sampling import RowSubsampler
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layer_contributions import capture
from dpkfc.linalg import blocks
from dpkfc.linalg.blocks import Outer, Patched
from dpkfc.linalg.metric import Eigenbasis, Kronecker
from dpkfc.linalg.sides import Dense
from dpkfc.memory import peak_bytes
from tests.curvature.toys import dense_matrix
from tests.models import randn

N = 6


class Twice(nn.Module):
    """One convolution called twice."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.conv(torch.tanh(self.conv(x)))


CONVS = {
    "plain": lambda: nn.Conv2d(4, 5, 3, padding=1),
    "without bias": lambda: nn.Conv2d(4, 5, 3, bias=False),
    "groups": lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2),
    "line": lambda: nn.Conv1d(4, 3, 3, dilation=2),
    "twice": Twice,
}


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(row_sampling, "LEAST_ROWS", 1)
    # two examples' patches, so that there are several chunks
    monkeypatch.setattr(blocks, "_CURVATURE_ELEMENTS", 300)


def block_of(name):
    torch.manual_seed(0)
    model = CONVS[name]().double()
    return capture_block(model, randn(N, 4, *(9,) * (1 if name == "line" else 2)))


def capture_block(model, x):
    blocks = capture(model, find_layers(model), lambda m: m(x).square().flatten(1).sum(1))
    (block,) = blocks.values()
    assert isinstance(block, Patched)
    return block


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("rows_per_dim", [None, 1.0, 3.0])
@pytest.mark.parametrize("name", CONVS)
def test_factors(name, rows_per_dim, sharing):
    block, found = block_of(name), list[dict[str, Tensor]]()
    whole = block.explicit()
    assert isinstance(whole, Outer)
    for form in (block, whole):
        held = RowSubsampler(torch.Generator().manual_seed(0), N, rows_per_dim)
        held.start(slice(0, N), None)
        layer = LayerAccumulator(form, FactorOptions(sharing=sharing), None, held)
        layer.add(form)
        found.append({side: dense_matrix(factor) for side, factor in layer.result().sides.items()})
    for side in ("input", "output"):
        assert_close(found[0][side], found[1][side], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("last", [None, 1, 4])
@pytest.mark.parametrize("name", CONVS)
def test_norms_of_examples(name, last):
    block = block_of(name)
    gradients = block.explicit().per_example()
    d_out, d_in = gradients.shape[1:]

    def side(d):
        root = randn(d, d)
        root = root @ root.T / d + torch.eye(d, dtype=torch.float64)
        return Dense(root, float(torch.linalg.matrix_norm(root, 2)))

    metric = Kronecker(side(d_in), side(d_out))
    squares = metric.apply(gradients).flatten(1).square().sum(1).view(N, -1).sum(1)
    expected = squares.sqrt()[0 if last is None else N - last :]
    assert_close(
        probe_norms({"a": block}, {"a": metric}, last=last)[0], expected, rtol=1e-10, atol=0
    )
    basis = Eigenbasis(
        0.5 + torch.rand(d_out, d_in, dtype=torch.float64), torch.linalg.qr(metric.input.root)[0]
    )
    turned = basis.apply(gradients).flatten(1).square().sum(1).view(N, -1).sum(1)
    assert_close(layer_norms(block, basis).square(), turned, rtol=1e-10, atol=0)


def test_few_rows_take_little_memory_and_many_no_second_copy():
    model = nn.Conv2d(16, 16, 3, padding=1, bias=False)
    block = capture_block(model, torch.randn(32, 16, 16, 16))
    whole = 4 * block.b.shape[0] * block.b.shape[1] * block.d_in
    few, many = torch.arange(0, 8192, 64), torch.arange(0, 8192, 3)
    assert peak_bytes(lambda: block.input_rows(few)) < whole / 8
    assert peak_bytes(lambda: block.input_rows(many)) < 1.6 * whole


def test_norms_on_a_probe_need_no_products_of_many_positions():
    model = nn.Conv2d(36, 36, 3, padding=1, bias=False)
    block = capture_block(model, torch.randn(1, 36, 64, 64))
    products = 4 * block.b.shape[1] ** 2
    metric = Kronecker(Dense(torch.eye(324), 1.0))
    assert peak_bytes(lambda: layer_norms(block, metric)) < products / 8
