"""Convolutions of several rows an example: the grouped convolution gives what explicit patches
give.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from dpkfc.gradients.layers import Call, Layer
from dpkfc.gradients.rules import blocks_of
from dpkfc.linalg.blocks import (
    ConvBlock,
    Outer,
    Patched,
    conv_block,
    interleave_calls,
)
from dpkfc.linalg.magnitudes import bound_magnitudes
from dpkfc.tracking.states import BatchAxis

CONVS = {
    "plain": lambda: nn.Conv2d(6, 8, 3, padding=1),
    "few columns": lambda: nn.Conv2d(2, 3, 3),
    "stride": lambda: nn.Conv2d(4, 5, 3, stride=2, padding=1),
    "dilation": lambda: nn.Conv2d(4, 5, 3, dilation=2, bias=False),
    "groups": lambda: nn.Conv2d(8, 6, 3, groups=2),
    "one pixel": lambda: nn.Conv2d(40, 5, 1),
    "line": lambda: nn.Conv1d(12, 4, 3, padding="same"),
    "volume": lambda: nn.Conv3d(5, 4, 2),
    "bias alone": lambda: _frozen(nn.Conv2d(4, 5, 3)),
}
N, VIEWS = 3, 4


def _frozen(module):
    module.weight.requires_grad_(False)
    return module


def _calls(name, rows, times=1):
    module = CONVS[name]().double()
    # Some have more than 64 positions, and some fewer.
    shape = (module.in_channels, *(11,) * len(module.kernel_size))
    inputs = [torch.randn(rows, *shape, dtype=torch.float64) for _ in range(times)]
    return module, [(x, torch.randn_like(module(x))) for x in inputs]


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("name", ["plain", "stride", "dilation", "groups", "line"])
@pytest.mark.parametrize("count", [32, 33, 70])
def test_many_examples_have_the_gradients_that_each_has_alone(name, count, views):
    """More than 32 are formed in several parts."""
    module, [(x, b)] = _calls(name, count * views)
    block = conv_block(module, x, b).merge_rows(count, views)
    alone = [block.select(slice(i, i + 1)).per_example() for i in range(count)]
    assert_close(block.per_example(), torch.cat(alone))
    inputs = x[-views:]
    (weight,) = torch.autograd.grad(module(inputs), [module.weight], b[-views:])
    width = weight[0].numel()
    last = alone[-1].flatten(0, 1)[:, :width]
    assert_close(last, weight.flatten(1))


@pytest.mark.parametrize("views", [1, VIEWS])
@pytest.mark.parametrize("name", sorted(set(CONVS) - {"line", "volume"}))
def test_the_order_of_channels_in_memory_changes_nothing(name, views):
    module, [(x, b)] = _calls(name, N * VIEWS)
    b[:, :, 0] = 0  # positions without a gradient
    b[1] = float("nan")
    last = [one.contiguous(memory_format=torch.channels_last) for one in (x, b)]
    assert not last[1].is_contiguous()
    one, other = (
        conv_block(module, *pair).merge_rows(N * VIEWS // views, views) for pair in ((x, b), last)
    )
    assert isinstance(one, ConvBlock) and isinstance(other, ConvBlock)
    weights = torch.rand(one.batch_size, dtype=torch.float64)
    same = {"rtol": 1e-11, "atol": 1e-12, "equal_nan": True}
    assert_close(bound_magnitudes(other)[0], bound_magnitudes(one)[0], **same)
    assert torch.equal(other.count_positions(), one.count_positions())
    assert one.count_positions().min() < one.positions
    assert_close(other.per_example(), one.per_example(), **same)
    assert_close(other.weighted_sum(weights), one.weighted_sum(weights), **same)
    assert_close(other.outer().per_example(), one.outer().per_example(), **same)


@pytest.mark.parametrize("name", sorted(CONVS))
def test_the_weighted_sum_adds_the_gradients_of_single_examples(name):
    module, [(x, b)] = _calls(name, N * VIEWS)
    block = conv_block(module, x, b).merge_rows(N, VIEWS)
    weights = torch.rand(N, dtype=torch.float64)
    gradients = block.per_example().unflatten(0, (N, -1)).flatten(1, 2)
    expected = torch.einsum("n,nod->od", weights, gradients)
    assert_close(block.weighted_sum(weights), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("size", [1.0, 1e-3])
@pytest.mark.parametrize("name", sorted(CONVS))
def test_magnitudes_are_not_below_those_of_the_rows(name, size):
    """√Σ_g (Σ_t ‖a_gt‖‖b_gt‖)², also where hardly more than the bias is left of a_gt."""
    module, [(x, b)] = _calls(name, N * VIEWS)
    block = conv_block(module, size * x, b).merge_rows(N, VIEWS)
    rows = block.outer().explicit()
    products = rows.a.norm(dim=2) * rows.b.norm(dim=2)
    exact = products.sum(1).view(N, -1).norm(dim=1)
    assert bool((bound_magnitudes(block)[0] >= exact).all())


def test_calls_of_other_shapes_become_patches():
    module, [(x, b)] = _calls("plain", N)
    small, less = x[..., :5, :5], b[..., :5, :5]
    assert interleave_calls([conv_block(module, x, b), conv_block(module, small, less)]) is None
    joined = blocks_of(_layer(module), [_call(module, x, b), _call(module, small, less)], N)
    expected = (
        conv_block(module, x, b).per_example() + conv_block(module, small, less).per_example()
    )
    assert_close(joined.explicit().per_example(), expected, rtol=1e-11, atol=1e-12)
    assert (
        interleave_calls(
            [conv_block(module, x, b), replace(conv_block(module, x, b), stride=(2, 2))]
        )
        is None
    )


def _call(module, x, b):
    return Call(module, (x,), {}, [b], [BatchAxis(0)], [BatchAxis(0)])


def _layer(module):
    return Layer(
        "conv",
        (module,),
        "conv",
        {name: name for name, p in module.named_parameters() if p.requires_grad},
    )


@pytest.mark.parametrize("last", [False, True])
def test_a_position_whose_channels_cancel_counts(last):
    module = nn.Conv2d(2, 4, 1)
    b = torch.zeros(2, 4, 3, 3)
    b[0, :, 1, 1] = torch.tensor([1.0, -1.0, 2.0, -2.0])
    b[0, 0, 0, 0] = 1e-44  # below the normal numbers
    b[1, :, 0, 2] = float("nan")
    b = b.to(memory_format=torch.channels_last) if last else b
    assert conv_block(module, torch.randn(2, 2, 3, 3), b).count_positions().tolist() == [2, 1]


@pytest.mark.parametrize("views", [1, VIEWS])
@pytest.mark.parametrize("name", sorted(CONVS))
@pytest.mark.parametrize("layout", ["first", "last"])
def test_patches_that_are_formed_when_asked_for_are_those_of_the_explicit_form(name, views, layout):
    module, [(x, b)] = _calls(name, N * views)
    if layout == "last":
        x, b = (side.movedim(1, -1).contiguous().movedim(-1, 1) for side in (x, b))
    block = conv_block(module, x, b).merge_rows(N, views)
    assert isinstance(block, ConvBlock)
    whole, patched = block.outer(), block.make_factor_block()
    if name == "bias alone":
        assert isinstance(patched, Outer) and torch.equal(patched.a, whole.a)
        return
    assert isinstance(patched, Patched)
    assert (patched.batch_size, patched.groups, patched.d_in) == (N, whole.groups, whole.d_in)
    again = patched.explicit()
    assert isinstance(again, Outer)
    assert (
        torch.equal(again.a, whole.a)
        and torch.equal(again.b, whole.b)
        and again.groups == whole.groups
    )
    assert torch.allclose(patched.per_example(), whole.per_example(), rtol=1e-12, atol=1e-12)
    flat = whole.a.flatten(0, 1)
    for count in (3, len(flat)):  # a few, which are gathered, and all, which are formed
        index = torch.randperm(len(flat))[:count]
        assert torch.equal(patched.input_rows(index), flat[index])
    part = patched.select(slice(1, 3)).explicit()
    assert torch.equal(part.a, whole.a[whole.groups : 3 * whole.groups]) and part.batch_size == 2
