"""A listening tape hears in the caller's own backward pass what the tape's own would have computed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from dpkfc.gradients.layers import find_layers
from dpkfc.gradients.tape import Tape
from tests.gradients.cases import CASES, build, loss_fn


def leaves(calls):
    return [(name, g) for name, group in sorted(calls.items()) for call in group for g in call.outputs]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_listening_gives_the_calls_of_the_tapes_own_backward_pass(case) -> None:
    model, batch = build(case)
    layers = find_layers(model)
    own = Tape(model, layers)
    with own:
        losses = loss_fn(model, batch)
    expected = leaves(own.backward(losses))
    heard = []
    tape = Tape(model, layers, on_gradient=heard.append, scale=len(losses))
    with tape:
        loss = loss_fn(model, batch).mean()
    loss.backward()
    assert heard
    found = leaves(tape.collect())
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, a), (_, b) in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, msg=name)
    covered = {full for layer in layers if layer.rule != "fallback" for full in layer.parameters.values()}
    assert all(p.grad is None for name, p in model.named_parameters() if name in covered)
    assert all(not p._backward_hooks for p in model.parameters())


def test_a_pass_that_is_never_differentiated_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    tape = Tape(model, find_layers(model), on_gradient=lambda tape: None)
    with tape:
        out = model(torch.randn(5, 3))
    gone = weakref.ref(tape)
    gc.disable()
    try:
        del tape, out
        assert gone() is None
    finally:
        gc.enable()


def test_a_pass_differentiated_twice_is_refused() -> None:
    model = nn.Linear(3, 2)
    tape = Tape(model, find_layers(model), on_gradient=lambda tape: None)
    with tape:
        loss = model(torch.randn(5, 3)).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(ValueError, match="differentiated twice"):
        tape.collect()


def test_an_input_overwritten_after_the_layer_read_it_is_named() -> None:
    model = nn.Linear(3, 2)
    tape = Tape(model, find_layers(model), on_gradient=lambda tape: None)
    x = torch.randn(5, 3)
    with tape:
        loss = model(x).mean()
    x += 1
    loss.backward()
    with pytest.raises(ValueError, match="changed in place"):
        tape.collect()


class Token(nn.Module):
    """A module whose output is its parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(5, 2))

    def forward(self) -> torch.Tensor:
        return self.token


def test_a_parameter_that_is_an_output_keeps_no_hook() -> None:
    model = Token()
    tape = Tape(model, find_layers(model), on_gradient=lambda tape: None)
    with tape:
        model().sum().backward()
    assert not model.token._backward_hooks
    assert torch.equal(tape.collect()[""][0].outputs[0], torch.ones(5, 2))
