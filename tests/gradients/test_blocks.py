"""Every block against a loop of autograd over single examples: whole, in parts, merged, summed and
along a basis.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from dpkfc.linalg import blocks
from dpkfc.linalg.blocks import (
    Lookup,
    MaterializedGradients,
    Outer,
    Patched,
    PerExample,
    Tied,
    conv_block,
)
from dpkfc.linalg.norms import per_example_norms
from dpkfc.linalg.subspace import Span
from tests.models import randn
from tests.patching import patch_linalg

N, VIEWS, K = 6, 2, 3
F64 = torch.float64
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def loop_over_examples(loss, *parameters):
    """The flat gradient of every example by plain autograd."""
    rows = []
    for n in range(N):
        grads = torch.autograd.grad(loss(n), parameters)
        rows.append(torch.cat([g.flatten() for g in grads]))
    return rows


def stack_as_matrix(rows, d_out):
    """The entries of weight and bias in the order of one matrix, the bias as its last column."""
    return [torch.cat([g[:-d_out].view(d_out, -1), g[-d_out:, None]], 1).flatten() for g in rows]


def linear(positions):
    module = nn.Linear(3, 4).double()
    x, b = randn(N, positions, 3), randn(N, positions, 4)
    rows = loop_over_examples(lambda n: (module(x[n]) * b[n]).sum(), module.weight, module.bias)
    return Outer(x, b, homogeneous=True), stack_as_matrix(rows, 4)


def convolution(form):
    module = nn.Conv2d(4, 6, 3, groups=2).double()
    x = randn(N, VIEWS, 4, 5, 4)
    b = randn(N, VIEWS, *module(x[0]).shape[1:])
    rows = stack_as_matrix(
        loop_over_examples(lambda n: (module(x[n]) * b[n]).sum(), module.weight, module.bias), 6
    )
    block = conv_block(module, x.flatten(0, 1), b.flatten(0, 1)).merge_rows(N, VIEWS)
    if form == "materialised":
        return MaterializedGradients(block.outer().per_example(), module.groups), rows
    return {"image": lambda: block, "rows": block.outer, "patched": block.make_factor_block}[
        form
    ](), rows


def make_one_position():
    module = nn.Conv1d(4, 6, 1, groups=2).double()
    x, b = randn(N, 4, 1), randn(N, 6, 1)
    rows = loop_over_examples(lambda n: (module(x[n]) * b[n]).sum(), module.weight, module.bias)
    return conv_block(module, x, b).outer(), stack_as_matrix(rows, 6)


def lookup():
    table = torch.randn(5, 3, dtype=F64, requires_grad=True)
    ids, b = torch.randint(0, 5, (N, 4)), randn(N, 4, 3)
    ids[:, 1] = ids[:, 0]  # rows that are read twice
    return Lookup(ids, b, 5), loop_over_examples(
        lambda n: (F.embedding(ids[n], table) * b[n]).sum(), table
    )


def make_tied():
    weight = torch.randn(5, 3, dtype=F64, requires_grad=True)
    ids, c = torch.randint(0, 5, (N, 4)), randn(N, 4, 3)
    a, b = randn(N, 2, 3), randn(N, 2, 5)

    def loss(n):
        return (F.embedding(ids[n], weight) * c[n]).sum() + (F.linear(a[n], weight) * b[n]).sum()

    return Tied(Lookup(ids, c, 5), Outer(a, b)), loop_over_examples(loss, weight)


def norm():
    module = nn.LayerNorm(3).double()
    x, b = randn(N, 3), randn(N, 3)
    rows = loop_over_examples(lambda n: (module(x[n]) * b[n]).sum(), module.weight, module.bias)
    whole = torch.stack(rows)
    return PerExample({"weight": whole[:, :3], "bias": whole[:, 3:]}), rows


KINDS = {
    "linear": lambda: linear(1),
    "linear on sequences": lambda: linear(2),
    "convolution": lambda: convolution("image"),
    "rows of groups": lambda: convolution("rows"),
    "rows of groups with one position": make_one_position,
    "patches": lambda: convolution("patched"),
    "gradients of groups": lambda: convolution("materialised"),
    "embedding": lookup,
    "tied": make_tied,
    "norm": norm,
}
READ_BY_CLIPPING = [name for name in KINDS if name != "patches"]


def flat(block):
    """The gradients of a block `[N, numel]`."""
    if isinstance(block, PerExample):
        return torch.cat([g.flatten(1) for g in block.grads.values()], 1)
    return block.per_example().reshape(block.batch_size, -1)


def sum_block(block, weights, excluded=None):
    total = block.weighted_sum(weights, excluded)
    if isinstance(total, dict):
        return torch.cat([x.flatten() for x in total.values()])
    return total.flatten()


def make_block(name):
    torch.manual_seed(0)
    block, rows = KINDS[name]()
    return block, torch.stack(rows)


def span_of(block, size):
    """Directions along which a block is read, and the same as a matrix `[K, size]`."""
    directions = randn(K, size)
    if isinstance(block, PerExample):
        vectors = {"weight": directions[:, :3], "bias": directions[:, 3:]}
    else:
        d_out = {15: 5, 16: 4}.get(size, 6)
        vectors = {"": directions.view(K, d_out, -1)}
    return Span(vectors, 0, float(directions.norm())), directions


@pytest.mark.parametrize("name", KINDS)
def test_a_block_holds_the_gradients_of_single_examples(name):
    block, rows = make_block(name)
    assert block.batch_size == N and block.num_entries == rows.shape[1]
    assert_close(flat(block), rows, **CLOSE)


@pytest.mark.parametrize("columns", [33, 129], ids=["convolution", "product"])
@pytest.mark.parametrize("entries", [1, 1 << 20], ids=["one at a time", "together"])
def test_a_convolution_of_few_channels_has_the_gradients_of_single_examples(
    columns, entries, monkeypatch
):
    monkeypatch.setattr(blocks, "_FEW_COLUMNS_OF_FEW_CHANNELS", columns)
    monkeypatch.setattr(blocks, "_PATCH_ENTRIES", entries)
    torch.manual_seed(0)
    module = nn.Conv2d(3, 4, 5, stride=2, padding=1).double()
    x = randn(N, 3, 7, 6)
    b = randn(N, *module(x).shape[1:])
    rows = loop_over_examples(lambda n: (module(x[n]) * b[n]).sum(), module.weight, module.bias)
    found = conv_block(module, x, b).per_example().flatten(1)
    assert_close(found, torch.stack(stack_as_matrix(rows, 4)), **CLOSE)


@pytest.mark.parametrize("start", range(N))
@pytest.mark.parametrize("name", KINDS)
def test_the_selected_examples_are_those_that_were_asked_for(name, start):
    block, rows = make_block(name)
    for stop in range(start + 1, N + 1):
        part = block.select(slice(start, stop))
        assert part.batch_size == stop - start
        assert_close(flat(part), rows[start:stop], **CLOSE)


@pytest.mark.parametrize(("count", "size"), [(2, 3), (3, 2), (2, 2), (6, 1), (1, 5)])
@pytest.mark.parametrize("name", READ_BY_CLIPPING)
def test_merged_rows_have_the_sum_of_their_gradients(name, count, size):
    block, rows = make_block(name)
    expected = rows[: count * size].view(count, size, -1).sum(1)
    merged = block.merge_rows(count, size)
    assert merged.batch_size == count
    assert_close(flat(merged), expected, **CLOSE)
    weights = torch.rand(count, dtype=F64)
    assert_close(sum_block(merged, weights), weights @ expected, **CLOSE)


@pytest.mark.parametrize("name", READ_BY_CLIPPING)
def test_the_weighted_sum_leaves_excluded_examples_out(name):
    block, rows = make_block(name)
    weights = torch.rand(N, dtype=F64)
    assert_close(sum_block(block, weights), weights @ rows, **CLOSE)
    bad = torch.arange(N) == 2
    kept = weights.masked_fill(bad, 0.0)
    assert_close(sum_block(spoil_third(block), weights, bad), kept @ rows, **CLOSE)


def spoil_third(block):
    """The block with NaN in all that its third example holds."""

    def spoil(x):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        x = x.clone()
        x.view(N, -1)[2] = float("nan")
        return x

    if isinstance(block, Tied):
        return Tied(spoil_third(block.lookup), spoil_third(block.outer))
    if isinstance(block, PerExample):
        return PerExample({role: spoil(g) for role, g in block.grads.items()})
    return type(block)(**{name: spoil(x) for name, x in vars(block).items()})


@pytest.mark.parametrize("elements", [1, 1 << 24], ids=["one at a time", "together"])
@pytest.mark.parametrize("name", READ_BY_CLIPPING)
def test_inner_products_are_those_of_the_gradients(name, elements, monkeypatch):
    monkeypatch.setattr(blocks, "_CHUNK_ELEMENTS", elements)
    block, rows = make_block(name)
    span, directions = span_of(block, rows.shape[1])
    found = block.inner_products(span)
    assert found.dtype == F64
    assert_close(found, rows @ directions.T, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("method", ["gram", "materialised"])
@pytest.mark.parametrize("name", READ_BY_CLIPPING)
def test_norms_in_chunks_of_one_example_are_those_of_the_gradients(name, method, monkeypatch):
    monkeypatch.setattr(blocks, "_CHUNK_ELEMENTS", 1)
    # formed once more for the sum
    patch_linalg(monkeypatch, "is_kept", lambda *_: False)
    block, rows = make_block(name)
    found = per_example_norms(block, None, method)
    assert_close(found.norms, rows.norm(dim=1), rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", [None, "materialised"])
@pytest.mark.parametrize("name", READ_BY_CLIPPING)
def test_a_block_of_no_example_has_no_norm_and_a_sum_of_zero(name, method):
    block, _ = make_block(name)
    empty = block.select(slice(0, 0))
    found = per_example_norms(empty, None, method)
    assert found.norms.shape == (0,) and found.norms.dtype == F64
    assert not sum_block(empty, torch.zeros(0, dtype=F64)).any()


@pytest.mark.parametrize("name", READ_BY_CLIPPING)
def test_a_mask_selects_what_a_slice_of_the_same_examples_selects(name):
    block, rows = make_block(name)
    mask = torch.arange(N) < 2
    assert torch.equal(flat(block.select(mask)), flat(block.select(slice(0, 2))))


def test_every_kind_of_block_is_held_against_the_loop():
    kinds = {type(make_block(name)[0]) for name in KINDS}
    assert kinds == {
        Outer,
        Patched,
        Lookup,
        PerExample,
        Tied,
        MaterializedGradients,
        blocks.ConvBlock,
    }
