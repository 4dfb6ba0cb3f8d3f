"""Every trainable parameter belongs to exactly one layer, or is refused by name."""

import pytest
import torch
from torch import nn

from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.one_pass import batch_tracker
from dpkfc.gradients.tape import Tape
from dpkfc.tracking.modes import follow


class Holder(nn.Module):
    """Lists and dictionaries of parameters, nested, in containers that are never called."""

    def __init__(self):
        super().__init__()
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(4))])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.ones(4))})
        self.store = nn.Module()
        self.store.deep = nn.ModuleDict({"layer": nn.Linear(4, 4)})
        self.store.bare = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = x * self.gains[0] + self.named["shift"]
        return self.store.deep["layer"](x) + self.store.bare


def test_parameters_in_containers_belong_to_the_module_that_is_called():
    layers = {layer.name: layer for layer in find_layers(nn.Sequential(Holder()))}
    assert set(layers) == {"0", "0.store.deep.layer"}
    assert set(layers["0"].parameters) == {"gains.0", "named.shift", "store.bare"}


def test_a_container_that_nothing_calls_is_refused_by_name():
    gains = nn.ParameterList([nn.Parameter(torch.ones(3))])
    model = nn.ModuleDict({"layer": nn.Linear(3, 3), "gains": gains})
    with pytest.raises(
        ValueError, match=r"'gains.0' is held by ParameterList.*Give the model a forward function"
    ):
        find_layers(model)
    gains[0].requires_grad_(False)
    assert [layer.name for layer in find_layers(model)] == ["layer"]


def test_a_module_under_two_names_is_one_layer():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    layers = find_layers(model)
    assert [layer.name for layer in layers] == ["0"]
    with Tape(model, layers):
        assert len(shared._forward_hooks) == 1


def test_a_layer_without_a_call_contributes_zeros():
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "seen": nn.Linear(4, 3)}).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    tracker = batch_tracker(model, x, 5)
    tape = Tape(model, find_layers(model), tracker=tracker)
    with follow(tracker), tape:
        model["seen"](x)
        losses = model["used"](x).square().sum(1)
    assert not bool(tape.backward(losses)["seen"][0].output_gradients[0].any())
