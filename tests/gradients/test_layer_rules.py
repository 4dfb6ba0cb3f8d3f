"""Rules of users for their own modules, against a loop of autograd in float64."""

import pytest
import torch
from torch import nn

from dpkfc import register_layer_rule
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.rules import blocks_of
from tests.gradients.loop import assert_equals_a_loop, loss_fn, record
from tests.models import randn

N, T, D = 5, 3, 4


class Scale(nn.Module):
    """A gain for every feature, times a factor that all examples share, and a bias for every
    feature.
    """

    def __init__(self, width=D):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(width))
        self.offset = nn.Parameter(torch.randn(width))

    def forward(self, x, factor=None):
        scaled = x * self.gain
        return (scaled if factor is None else scaled * factor) + self.offset


def scale_rule(call):
    g = call.gradient
    x = call.input * call.kwargs.get("factor", torch.ones(())).to(g)
    return {"gain": (g * x).reshape(-1, D).sum(0), "offset": g.reshape(-1, D).sum(0)}


register_layer_rule(Scale, scale_rule)


class Net(nn.Module):
    """A module with its own rule between linear layers, on single rows, sequences or with time
    first.
    """

    def __init__(self, calls=1, time_first=False, factor=False):
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(3, D), Scale(), nn.Linear(D, 2)
        self.calls, self.time_first = calls, time_first
        self.register_buffer("factor", torch.rand(D) if factor else None)

    def forward(self, x):
        x = self.first(x)
        if self.time_first:
            x = x.transpose(0, 1)
        for _ in range(self.calls):
            x = torch.tanh(
                self.scale(x) if self.factor is None else self.scale(x, factor=self.factor)
            )
        if self.time_first:
            x = x.transpose(0, 1)
        return self.last(x)


@pytest.mark.parametrize("shape", [(N, 3), (N, T, 3)], ids=["rows", "sequences"])
@pytest.mark.parametrize("calls", [1, 2], ids=["one call", "two calls"])
@pytest.mark.parametrize("factor", [False, True], ids=["plain", "shared input"])
def test_a_registered_rule_gives_the_gradients_of_autograd(shape, calls, factor):
    torch.manual_seed(0)
    model = Net(calls, factor=factor).double()
    assert {layer.name: layer.rule for layer in find_layers(model)}["scale"] == "custom"
    assert_equals_a_loop(model, (randn(*shape),))


def test_the_rule_sees_the_examples_in_front():
    torch.manual_seed(0)
    model = Net(time_first=True).double()
    assert_equals_a_loop(model, (randn(N, T, 3),))


def test_the_rule_and_not_the_fallback_is_called(monkeypatch):
    monkeypatch.setattr("dpkfc.gradients.rules.fallback_gradients", None)
    model = Net()
    layers, x = find_layers(model), torch.randn(N, 3)
    calls = record(model, layers, lambda: loss_fn(model, (x,)))
    (layer,) = [layer for layer in layers if layer.name == "scale"]
    assert set(blocks_of(layer, calls["scale"], N).grads) == {"gain", "offset"}


def test_a_subclass_and_a_replaced_forward_take_the_fallback():
    class Other(Scale):
        pass

    changed = Scale()
    changed.forward = lambda x: x * changed.gain.square() + changed.offset  # type: ignore[method-assign]
    model = nn.Sequential(Other(), changed)
    assert [layer.rule for layer in find_layers(model)] == ["fallback", "fallback"]


def blocks_by(rule):
    """Apply a rule of the user to the second layer of a model."""

    class Ruled(Scale):
        pass

    register_layer_rule(Ruled, rule)
    model = nn.Sequential(nn.Linear(3, D), Ruled())
    layers = find_layers(model)
    calls = record(model, layers, lambda: model(torch.randn(N, 3)).sum(1))
    return blocks_of(layers[1], calls["1"], N)


def test_gradients_of_another_shape_are_refused_by_name():
    message = (
        r"rule of layer '1' returned \(\) for 'gain'; return the gradient of one example, of shape"
        r" \(4,\)"
    )
    with pytest.raises(ValueError, match=message):
        blocks_by(lambda call: {"gain": call.gradient.sum(0), "offset": call.gradient})


@pytest.mark.parametrize("way", ["a number of the batch", "random numbers", "a written memory"])
def test_a_rule_that_reaches_for_more_than_its_example_is_an_error(way):
    """`torch.vmap` hands a rule one example, so the others cannot be in its gradients."""
    memory = torch.zeros(D)

    def rule(call):
        g = call.gradient
        if way == "a number of the batch":
            g = g * float(g.sum())
        elif way == "random numbers":
            g = g * torch.rand(D)
        else:
            memory.add_(g)
        return {"gain": g * call.input, "offset": g}

    with pytest.raises(RuntimeError, match="vmap|broadcast"):
        blocks_by(rule)


def test_only_classes_of_modules_have_rules():
    with pytest.raises(TypeError, match=r"subclass of nn\.Module"):
        register_layer_rule(torch.tanh, scale_rule)  # type: ignore[arg-type]
