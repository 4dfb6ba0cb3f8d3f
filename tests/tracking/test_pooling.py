"""Max pooling with channels last gives what torch's own pooling gives."""

import pytest
import torch
from torch import nn

from dpkfc.tracking import pooling
from dpkfc.tracking.modes import follow
from dpkfc.tracking.tracker import Tracker

SETTINGS = [
    {"kernel_size": 2},
    {"kernel_size": (2, 1), "stride": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 2, "stride": 3, "dilation": 2},
    {"kernel_size": 2, "stride": 2, "ceil_mode": True},
    {"kernel_size": 2, "return_indices": True},
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_followed_max_pooling_gives_the_values_places_and_gradients_of_torch(
    settings, dtype, monkeypatch
):
    monkeypatch.setattr(pooling, "_PART", 2 * 8 * 49)  # parts of two examples, and of one
    torch.manual_seed(0)
    x = torch.randn(5, 8, 7, 7).relu().to(dtype)  # many are equal
    x[1, :, 2:5, 2:5] = float("nan")
    x[2] = -float("inf")
    x.requires_grad_()
    pool = nn.MaxPool2d(**settings)

    def values_and_gradient():
        found = pool(x)
        found = found if isinstance(found, tuple) else (found,)
        (gradient,) = torch.autograd.grad(found[0].square().nan_to_num(1, 1, 1).sum(), x)
        return [*found, gradient]

    expected = values_and_gradient()
    with follow(Tracker(5, ())):
        found = values_and_gradient()
    for y, z in zip(found, expected, strict=True):
        torch.testing.assert_close(y, z, rtol=0, atol=0, equal_nan=True)
        assert y.stride() == z.stride()


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 3, 6, 6),
        torch.randn(8, 6, 6),
        torch.randn(0, 8, 6, 6),
        torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last),
    ],
    ids=["few channels", "no batch", "empty", "channels last"],
)
def test_other_inputs_are_pooled_as_they_are(x):
    expected = nn.functional.max_pool2d(x, 2)
    with follow(Tracker(4, ())):
        found = nn.functional.max_pool2d(x, 2)
    assert torch.equal(found, expected) and found.stride() == expected.stride()


def test_a_window_that_does_not_fit_is_the_error_of_torch():
    x = torch.randn(4, 8, 2, 2)
    with pytest.raises(RuntimeError) as expected:
        nn.functional.max_pool2d(x, 3)
    with follow(Tracker(4, ())), pytest.raises(RuntimeError) as found:
        nn.functional.max_pool2d(x, 3)
    assert str(found.value) == str(expected.value)
