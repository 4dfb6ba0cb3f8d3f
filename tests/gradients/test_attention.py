"""torch's attention as two linear layers: what `test_fallback_modules.py` does not ask of every
module.
"""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from dpkfc.gradients import rules
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layer_contributions import capture
from dpkfc.linalg.blocks import Outer
from tests.gradients.loop import assert_equals_a_loop, loss_fn, record
from tests.models import randn

N, T, D = 4, 5, 6


class Reads(nn.Module):
    """Attention whose queries, keys and values are of one, two or three tensors; called twice."""

    def __init__(self, which="xxx", **options):
        super().__init__()
        self.first, self.other, self.which = nn.Linear(3, D), nn.Linear(3, D), which
        self.inner = nn.MultiheadAttention(D, 2, **{"batch_first": True, **options})

    def forward(self, x):
        first, other = self.first(x), self.other(x)
        given = {"x": first, "y": other.tanh(), "z": other[:, :3].sin(), "w": first[:, 1:4].cos()}
        if not self.inner.batch_first:
            given = {name: v.transpose(0, 1) for name, v in given.items()}
        once = self.inner(*(given[c] for c in self.which))[0]
        twice = self.inner(once, once, once, need_weights=False)[0]
        return twice if self.inner.batch_first else twice.transpose(0, 1)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("which", ["xxx", "xyy", "xyx", "xzz", "xzw"])
def test_queries_keys_and_values_of_their_own(which, batch_first, monkeypatch):
    monkeypatch.setattr(rules, "fallback_gradients", None)
    assert_equals_a_loop(Reads(which, batch_first=batch_first).double(), (randn(N, T, 3),))


@pytest.mark.parametrize(
    "frozen",
    [
        ("in_proj_weight",),
        ("in_proj_bias",),
        ("in_proj_weight", "in_proj_bias"),
        ("out_proj.weight", "out_proj.bias"),
        ("out_proj.bias",),
        ("in_proj_bias", "out_proj.weight"),
    ],
)
def test_some_of_it_may_be_frozen(frozen):
    model = Reads("xyy").double()
    for name in frozen:
        model.inner.get_parameter(name).requires_grad_(False)
    assert_equals_a_loop(model, (randn(N, T, 3),))


@pytest.mark.parametrize("weights", [True, False])
def test_dropout_of_attention_weights_is_that_of_the_call(weights):
    """The sum of the examples' gradients is autograd's under the same random numbers, and the
    stream goes on as if untouched.
    """

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.drop = nn.Linear(3, D), nn.Dropout(0.3)
            self.inner = nn.MultiheadAttention(D, 2, 0.4, batch_first=True)

        def forward(self, x):
            x = self.drop(self.first(x))
            read, shown = self.inner(x, x, x, need_weights=weights)
            read = self.drop(read)  # draws after the call that is repeated
            return read if shown is None else torch.cat([read, shown], 2)

    model, batch = Encoder().double(), (randn(N, T, 3),)
    layers = find_layers(model)
    torch.manual_seed(3)
    loss_fn(model, batch)
    expected = torch.rand(3)
    torch.manual_seed(3)
    calls = record(model, layers, lambda: loss_fn(model, batch))
    for layer in layers:
        rules.blocks_of(layer, calls[layer.name], N)
    assert torch.equal(torch.rand(3), expected)


def test_parametrised_buffers_are_no_plain_weights():
    """The parametrization, which may draw random numbers, would run again after the pass."""
    module = nn.MultiheadAttention(4, 2)
    weight = module.in_proj_weight.detach()
    del module.in_proj_weight
    module.register_buffer("in_proj_weight", weight)
    register_parametrization(module, "in_proj_weight", nn.Dropout())
    assert [layer.rule for layer in find_layers(nn.Sequential(module))] == ["fallback"]


def test_both_of_its_layers_have_dense_factors_with_and_without_a_backward_pass():
    model = Reads().double().eval()
    layers, x = find_layers(model), randn(N, T, 3)
    assert {layer.name: layer.rule for layer in layers} == {
        "first": "linear",
        "other": "linear",
        "inner": "linear",
        "inner.out_proj": "linear",
    }
    seen = capture(model, layers, lambda m: loss_fn(m, (x,)))
    with torch.no_grad():
        read = capture(model, layers, lambda m: loss_fn(m, (x,)))
    for name in ("inner", "inner.out_proj"):
        one, other = seen[name], read[name]
        assert isinstance(one, Outer) and isinstance(other, Outer)
        torch.testing.assert_close(one.a, other.a)
