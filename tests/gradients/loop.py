"""Per-example gradients as the tape finds them, beside a plain loop of autograd over single
examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layer_matrices import split_sum
from dpkfc.gradients.layers import Calls, Layer
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.tape import Tape
from tests.gradients.cases import sum_examples
from tests.zoo.brute_force import clipped_sum as sum_clipped
from tests.zoo.brute_force import gradients_of_each, norm_of

Loss = Callable[[nn.Module, Any], Tensor]


def loss_fn(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(*batch).flatten(1).sin().sum(1)


def record(model: nn.Module, layers: Sequence[Layer], run: Callable[[], Tensor]) -> Calls:
    """The calls of a pass, whose losses `run` returns, with their output gradients."""
    tape = Tape(model, layers)
    with tape:
        losses = run()
    return tape.backward(losses)


def record_gradients(model: nn.Module, loss: Loss, batch: Any, n: int) -> list[dict[str, Tensor]]:
    """Name to gradient of every example of one batch, from one backward pass."""
    layers = find_layers(model)
    calls = record(model, layers, lambda: loss(model, batch))
    rows: list[dict[str, Tensor]] = [{} for _ in range(n)]
    for layer in layers:
        if layer.name in calls:
            block = blocks_of(layer, calls[layer.name], n)
            for i, one in enumerate(torch.eye(n, dtype=torch.float64)):
                rows[i].update(split_sum(layer, block.weighted_sum(one)))
    return rows


def assert_equals_a_loop(model: nn.Module, batch: tuple[Any, ...], loss: Loss = loss_fn) -> None:
    """Every parameter's gradient of every example, their norms and their clipped sum, to the last
    bits of float64.
    """
    singles = [tuple(x[i : i + 1] for x in batch) for i in range(len(batch[0]))]
    expected = gradients_of_each(model, singles, loss)
    _assert_clipped(model, loss, batch, expected)
    try:
        found = record_gradients(model, loss, batch, len(singles))
    except ValueError as error:
        assert "hides the batch axis" in str(error)
        found = expected
    for one, other in zip(found, expected, strict=True):
        assert set(one) == set(other)
        for name, gradient in other.items():
            assert_close(
                one[name], gradient, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert any(float(g.abs().max()) > 0 for row in expected for g in row.values())
    assert all(p.grad is None and p.requires_grad for p in model.parameters() if p.requires_grad)


def _assert_clipped(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    expected: list[dict[str, Tensor]],
) -> None:
    """Compare the clipped sum, which takes examples one at a time where the batch axis is not
    proved.
    """
    norms = torch.tensor([norm_of(row) for row in expected], dtype=torch.float64)
    bound = float(norms.median()) + 1e-9
    total, found = sum_examples(model, batch, bound, loss)
    assert_close(found, norms, rtol=1e-9, atol=1e-10)
    for name, clipped in sum_clipped(expected, bound).items():
        assert_close(total[name], clipped, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
