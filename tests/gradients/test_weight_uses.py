"""Weights and biases that a module reads through functions, without a layer around them, beside a
loop over single examples.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.gradients.clipped_sum import batch_tracker, follow_pass
from dpkfc.gradients.discovery import find_layers
from dpkfc.tracking import BatchAxis
from tests.gradients.loop import assert_equals_a_loop, examples

N, D = 5, 4


class Direct(nn.Module):
    """A matrix and a bias that a function reads, in front of a layer."""

    def __init__(self, use: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        rows = 6 if use == "embedding" else 3
        columns = D if use in ("linear", "linear without bias", "transposed") else 3
        shape = (D, 3) if use in ("matmul", "rmatmul") else (rows, columns)
        if use == "permuted":
            shape = (3, 3)
        self.matrix = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(3, generator=generator, dtype=torch.float64))
        self.head = nn.Linear(3, 2, dtype=torch.float64)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        if self.use == "linear":
            x = F.linear(x, self.matrix, self.bias)
        elif self.use == "linear without bias":
            x = F.linear(x, self.matrix) * self.bias
        elif self.use == "twice":
            x = F.linear(F.linear(x, self.matrix, self.bias).tanh(), self.matrix, bias=self.bias)
        elif self.use == "transposed":
            x = x @ self.matrix.T + self.bias
        elif self.use == "permuted":
            x = x @ self.matrix.permute(0, 1) + self.bias
        elif self.use == "embedding":
            x = F.embedding(x, self.matrix, padding_idx=0) + self.bias
        else:
            x = x @ self.matrix + self.bias
        return self.head(x.tanh())


def squares(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    return model(batch[0]).square().flatten(1).sum(1)


@pytest.mark.parametrize("positions", [(), (7,), (2, 3)])
@pytest.mark.parametrize(
    "use",
    ["linear", "linear without bias", "twice", "transposed", "permuted", "embedding", "matmul"],
)
def test_a_weight_and_a_bias_that_a_function_reads(use: str, positions: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    if use == "embedding":
        x = torch.randint(0, 6, (N, *positions), generator=generator)
    else:
        width = 3 if use in ("twice", "permuted") else D
        x = torch.randn(N, *positions, width, generator=generator, dtype=torch.float64)
    assert_equals_a_loop(Direct(use), squares, (x,), examples((x,), N))


class Placed(nn.Module):
    """Adds what a layer makes of public rows to the examples."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows)
        self.places = nn.Linear(3, D) if rows.is_floating_point() else nn.Embedding(9, D)
        self.head = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(self.rows[: len(x)])
        return self.head(x + places.reshape(len(x), -1, D).sum(1)).squeeze(1)


@pytest.mark.parametrize(
    "rows", [torch.rand(9, 3), torch.arange(9)[:, None], torch.zeros(9, 2).long()]
)
def test_public_rows_of_a_layer_are_proved_where_they_are_equal(rows: Tensor) -> None:
    """A batch of one reads the first row, whatever place its example had before."""
    model, x = Placed(rows), torch.rand(N, D)
    tape, losses = follow_pass(
        lambda m, batch: m(batch), model, find_layers(model), x, batch_tracker(model, x, N)
    )
    is_equal = bool((rows == rows[0]).all())
    assert (tape.failure(losses) is None) == is_equal


@pytest.mark.parametrize("kind", [nn.GRU, nn.GRUCell])
@pytest.mark.parametrize("is_equal", [True, False])
def test_a_public_state_is_proved_where_it_is_equal_for_all(kind: type, is_equal: bool) -> None:
    model = nn.Sequential(kind(3, D))
    recurrent = model[0]
    state = torch.rand(9, D) * (not is_equal)

    def losses(_: nn.Module, x: Tensor) -> Tensor:
        if kind is nn.GRUCell:
            return recurrent(x[0], state[:N]).sum(1)
        return recurrent(x, state[None, :N])[0].sum((0, 2))

    x = torch.rand(1, N, 3)
    tracker = batch_tracker(model, None, N)
    tracker.set_state(x, BatchAxis(1))
    tape, summed = follow_pass(losses, model, find_layers(model), x, tracker)
    assert (tape.failure(summed) is None) == is_equal
