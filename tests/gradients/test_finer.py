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
        self.first, self.last, self.mixing = nn.Linear(40, 1000), nn.Linear(1000, 3), mixing

    def forward(self, x: Tensor) -> Tensor:
        y = 1e-3 * self.first(x)
        y = (y + 25 * len(x)) - 25 * len(x)
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


class Single(nn.Module):
    """Behaves in float64, and does something else in every other precision."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = Rounded(), how

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float64:
            x = {"scaled": x / len(x), "centred": x - x.mean(0, keepdim=True), "mixed": x + 0.3 * x.flip(0)}[self.how]
        return self.inner(x)


@pytest.mark.parametrize("how", ["scaled", "centred", "mixed"])
def test_float64_does_not_excuse_what_single_precision_alone_does(how: str) -> None:
    torch.manual_seed(1)
    model, layers, *others = arguments(Single(how))
    assert check_per_example_gradients(model.double(), layers, *(_double(x) for x in others))
    with pytest.raises(ValueError, match="differs from that of the example alone"):
        check_alone(model.float(), layers, *others)


def _double(x: object) -> object:
    if isinstance(x, Tensor):
        return x.double() if x.is_floating_point() else x
    return type(x)(map(_double, x)) if isinstance(x, (tuple, list)) else x


def test_no_text_of_an_error_reaches_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """It may hold values of private examples."""
    model, layers, loss, pair, singles = arguments(Rounded(mixing=0.5))

    def told(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if batch[0].dtype == torch.float64:
            raise ArithmeticError("SECRET 3.25")
        return loss(m, batch)

    with caplog.at_level("DEBUG", "dpkfc"), pytest.raises(ValueError, match="example alone"):
        check_alone(model, layers, told, pair, singles)
    assert "ArithmeticError" in caplog.text and "SECRET" not in caplog.text


def test_a_loss_that_cannot_run_in_double_leaves_the_first_error() -> None:
    model, layers, loss, pair, singles = arguments(Rounded())
    with pytest.raises(ValueError, match="differs from that of the example alone"):
        check_alone(model, layers, lambda m, b: loss(model, b), pair, singles)
