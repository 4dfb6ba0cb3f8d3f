"""A kink that rounding decides is no mixing of examples; mixing stays refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.gradients.finer import check_alone
from dpkfc.gradients.layers import find_layers
from dpkfc.gradients.verify import check_per_example_gradients


class Rounded(nn.Module):
    """Its float32 rounding depends on the size of the batch, as that of a convolution kernel may."""

    def __init__(self, mixing: float = 0.0) -> None:
        super().__init__()
        self.first, self.last, self.mixing = nn.Linear(40, 40), nn.Linear(40, 3), mixing

    def forward(self, x: Tensor) -> Tensor:
        y = 1e-3 * self.first(x)
        y = (y + 3e4 * len(x)) - 3e4 * len(x)
        return self.last(F.relu(y + self.mixing * y.mean(0)) * 1e3)


def arguments(model: nn.Module, dtype: torch.dtype = torch.float32) -> tuple:
    x, y = torch.randn(2, 40, dtype=dtype), torch.tensor([0, 2])
    singles = [(x[:1], y[:1]), (x[1:], y[1:])]
    return model, find_layers(model), lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"), (x, y), singles


def test_rounding_at_a_kink_is_taken() -> None:
    model = Rounded()
    with pytest.raises(ValueError, match="differs from that of the example alone"):
        check_per_example_gradients(*arguments(model))
    before = {n: p.clone() for n, p in model.named_parameters()}
    assert check_alone(*arguments(model))
    assert all(torch.equal(p, before[n]) and p.dtype == torch.float32 for n, p in model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mixing_is_refused_in_both_precisions(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="differs from that of the example alone"):
        check_alone(*arguments(Rounded(mixing=0.5).to(dtype), dtype))


def test_a_loss_that_cannot_run_in_double_leaves_the_first_error() -> None:
    model, layers, loss, pair, singles = arguments(Rounded())
    with pytest.raises(ValueError, match="differs from that of the example alone"):
        check_alone(model, layers, lambda m, b: loss(model, b), pair, singles)
