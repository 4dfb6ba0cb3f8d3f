"""Frozen parts cost nothing: no hook, no record, no backward pass below the lowest layer that
trains.
"""

import pytest
import torch
from torch import nn

from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.tape import Tape
from tests.gradients.loop import record

DEPTH = 6


def visit_nodes(losses, differentiate):
    """Autograd nodes that run while something is differentiated."""
    nodes, stack, ran = set(), [losses.grad_fn], []
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            stack.extend(parent for parent, _ in node.next_functions)
    handles = [node.register_prehook(lambda _: ran.append(1)) for node in nodes]
    differentiate()
    for handle in handles:
        handle.remove()
    return len(ran)


def stack(trained):
    model = nn.Sequential(
        nn.Embedding(5, 4), *[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(DEPTH)]
    )
    model.requires_grad_(False)
    for i in trained:
        model[i].requires_grad_(True)
    return model


def run(model, ids):
    tape = Tape(model, find_layers(model))
    with tape:
        losses = model(ids).square().flatten(1).sum(1)
    calls = {}
    count = visit_nodes(losses, lambda: calls.update(tape.backward(losses)))
    return count, set(calls)


def test_no_backward_runs_below_the_lowest_trained_layer():
    ids = torch.randint(0, 5, (3, 4))
    counts = [run(stack({i}), ids)[0] for i in range(DEPTH + 1)]
    assert all(low > high for low, high in zip(counts, counts[1:], strict=False))
    assert counts[-1] <= 6


def test_frozen_layers_above_pass_gradients_on_and_record_nothing():
    model, ids = stack({1}), torch.randint(0, 5, (3, 4))
    assert run(model, ids)[1] == {"1.0"}
    with Tape(model, find_layers(model)):
        hooked = [
            name for name, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks
        ]
    assert hooked == ["", "1.0"]  # the model's own hook reads how many examples there are


def test_an_input_that_requires_a_gradient_is_not_differentiated():
    """As gradient checkpointing of frozen models asks for it."""
    model = stack({3})
    x = torch.randn(3, 4, 4, requires_grad=True)
    plain = nn.Sequential(*list(model)[1:])
    tape = Tape(plain, find_layers(plain))
    with tape:
        losses = plain(x).square().flatten(1).sum(1)
    everything = visit_nodes(
        losses, lambda: torch.autograd.grad(losses.sum(), [x], retain_graph=True)
    )
    needed = visit_nodes(losses, lambda: tape.backward(losses))
    assert needed < everything - 3
    assert x.grad is None


def test_no_weight_gradient_is_ever_computed():
    """Of a linear layer one backward pass computes the product with the weight alone."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4)
    with torch.profiler.profile() as profile:
        record(model, find_layers(model), lambda: model(x).square().sum(1))
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::mm") == 1


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_matrix_without_entries_is_refused_until_it_is_frozen():
    model = nn.Sequential(nn.Linear(6, 0), nn.Linear(0, 2))
    for name in ("0.weight", "0.bias", "1.weight"):
        with pytest.raises(ValueError, match=f"parameter '{name}' has no entries"):
            find_layers(model)
        model.get_parameter(name).requires_grad_(False)
    assert set(record(model, find_layers(model), lambda: model(torch.randn(3, 6)).sum(1))) == {"1"}
