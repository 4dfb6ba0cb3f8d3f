"""Worry: "One broken or very large example decides how the arguments of a module are read for
everybody".
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.gradients.discovery import find_layers
from tests.gradients.whitened import clipped

T, D = 8, 4


class Scaled(nn.Module):
    """A gain of its own, and a table of positions [T, D] that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return torch.tanh((x + positions) * self.gain)


class TableFirst(Scaled):
    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        return super().forward(x, positions)


class Model(nn.Module):
    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.block, self.out, self.first = (
            TableFirst() if first else Scaled(),
            nn.Linear(D, 2),
            first,
        )
        self.register_buffer(
            "positions", torch.randn(T, D, generator=torch.Generator().manual_seed(2))
        )

    def forward(self, x: Tensor) -> Tensor:
        table = self.positions[: x.shape[1]]
        return self.out((self.block(table, x) if self.first else self.block(x, table)).sum(1))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def task(
    dtype: torch.dtype = torch.float64, first: bool = False
) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Model(first).to(dtype), 0.1 * torch.randn(T, T, D, dtype=dtype), torch.arange(T) % 2


BROKEN = {"NaN": float("nan"), "infinity": float("inf"), "very large": 1e30, "large": 1e4}


@pytest.mark.parametrize("first", [False, True], ids=["table last", "table first"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN)
def test_as_many_positions_as_examples_and_one_example_unlike_the_others(
    value: float, dtype: torch.dtype, first: bool
) -> None:
    """Nothing was seen before: the first batch has as many examples as the table has rows."""
    model, x, y = task(dtype, first)
    _, without = clipped(model, find_layers(model), (x[:-1], y[:-1]), loss_fn, 1.0)
    x[-1] = value
    _, total = clipped(model, find_layers(model), (x, y), loss_fn, 1.0)
    moved = torch.sqrt(sum((total[name] - without[name]).square().sum() for name in total))
    assert float(moved) <= 1 + 1e-6
    if value != value:
        assert float(moved) <= 1e-6


@pytest.mark.parametrize("fine", [1, 2])
def test_few_examples_that_are_not_broken_tell_as_well(fine: int) -> None:
    model, x, y = task()
    x[fine:] = float("nan")
    _, expected = clipped(model, find_layers(model), (x[:fine], y[:fine]), loss_fn, 1.0)
    _, total = clipped(model, find_layers(model), (x, y), loss_fn, 1.0)
    for name, found in total.items():
        torch.testing.assert_close(found, expected[name])


class Root(nn.Module):
    """No gradient at zero but an infinite one: the derivative of a root."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x * self.gain).square().sum(-1).sqrt() * mask


def test_a_gradient_that_is_infinite_for_one_example_alone() -> None:
    model = Root().double()
    x, mask = torch.randn(5, 3, D, dtype=torch.float64), torch.ones(5, 3, dtype=torch.float64)

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return m(*batch).sum(1)

    _, expected = clipped(model, find_layers(model), (x[1:], mask[1:]), loss, 1.0)
    x[0] = 0.0
    _, total = clipped(model, find_layers(model), (x, mask), loss, 1.0)
    torch.testing.assert_close(total["gain"], expected["gain"])


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return (x - 0.5 * x[[0]]) * self.gain  # every example sees the first


@pytest.mark.parametrize("value", [float("nan"), 1e6])
def test_mixing_is_found_behind_a_broken_example(value: float) -> None:
    model, x = (
        nn.Sequential(nn.Linear(D, D), Centred()).double(),
        torch.randn(6, D, dtype=torch.float64),
    )
    x[5] = value
    with pytest.raises(ValueError, match="aten.index.Tensor hides the batch axis"):
        clipped(model, find_layers(model), (x,), lambda m, b: m(b[0]).square().sum(1), 1.0)
