"""Factors from a few positions of every example: unbiased, the same for every micro-batch, exact
where nothing is saved.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpkfc.curvature import row_sampling
from dpkfc.curvature.layer_factors import FactorOptions, LayerAccumulator
from dpkfc.curvature.row_sampling import RowSubsampler
from dpkfc.linalg.blocks import Lookup, Outer, Tied
from tests.curvature.toys import dense_matrix
from tests.models import randn

F64 = torch.float64


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch):
    monkeypatch.setattr(row_sampling, "LEAST_ROWS", 1)


def _positions(size, rows_per_dim, seed=0):
    return RowSubsampler(torch.Generator().manual_seed(seed), size, rows_per_dim)


def _block(n, t, d_in, d_out, groups=1, homogeneous=False):
    a, b = randn(n * groups, t, d_in), randn(n * groups, t, d_out)
    return Outer(a, b, groups, homogeneous)


def _dense(block, held, cuts=(), mask=None, sharing="expand"):
    n = block.batch_size
    layer = LayerAccumulator(block, FactorOptions(sharing=sharing), None, held)
    edges = [0, *cuts, n]
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        held.start(slice(start, stop), None if mask is None else mask[start:stop])
        rows = slice(start * getattr(block, "groups", 1), stop * getattr(block, "groups", 1))
        if isinstance(block, Lookup):
            layer.add(Lookup(block.ids[rows], block.b[rows], block.num_rows))
        else:
            layer.add(Outer(block.a[rows], block.b[rows], block.groups, block.homogeneous))
    return layer.result().sides


@pytest.mark.parametrize("masked", [False, True])
def test_a_sampled_factor_is_unbiased(masked):
    """The mean over many draws of positions is the factor of all positions, whatever the examples'
    lengths.
    """
    n, t = 4, 9
    block = _block(n, t, 3, 2)
    lengths = torch.tensor([9, 1, 5, 2]) if masked else torch.full((n,), t)
    mask = torch.arange(t) < lengths.unsqueeze(1)
    kept = [(block.a[i, : lengths[i]], block.b[i, : lengths[i]]) for i in range(n)]
    exact_a = sum(a.T @ a for a, _ in kept) / n
    exact_g = sum(b.T @ b for _, b in kept) / int(lengths.sum())
    total_a, total_g, draws = torch.zeros(3, 3, dtype=F64), torch.zeros(2, 2, dtype=F64), 500
    for seed in range(draws):
        held = _positions(n, 2.5 if masked else 3.0, seed)
        sides = _dense(block, held, mask=mask if masked else None)
        total_a += dense_matrix(sides["input"]) / draws
        total_g += dense_matrix(sides["output"]) / draws
    assert torch.allclose(total_a, exact_a, atol=0.05 * float(exact_a.trace()))
    assert torch.allclose(total_g, exact_g, atol=0.05 * float(exact_g.trace()))
    assert not torch.allclose(dense_matrix(sides["input"]), exact_a, atol=1e-3)  # it was sampled


@pytest.mark.parametrize("masked", [False, True])
def test_a_sampled_factor_of_a_tied_table_is_unbiased(masked):
    n, t, v, d = 3, 8, 5, 2
    ids, c = torch.randint(v, (n, t)), randn(n, t, d)
    a, b = randn(n, t, d), randn(n, t, v)
    lengths = torch.tensor([8, 3, 5]) if masked else torch.full((n,), t)
    mask = torch.arange(t) < lengths.unsqueeze(1)
    read = b.norm(dim=-1, keepdim=True) * a
    exact = sum(x[mask].T @ x[mask] for x in (c, read)) / n
    total, draws = torch.zeros(d, d, dtype=F64), 500
    for seed in range(draws):
        held = _positions(n, 3.0, seed)
        held.start(slice(0, n), mask if masked else None)
        block = Tied(Lookup(ids, c, v), Outer(a, b))
        layer = LayerAccumulator(block, FactorOptions(), None, held)
        layer.add(block)
        found = dense_matrix(layer.result().sides["input"])
        total += found / draws
    assert torch.allclose(total, exact, atol=0.05 * float(exact.trace())) and not torch.allclose(
        found, exact, atol=1e-3
    )


@given(cut=st.integers(1, 10), groups=st.integers(1, 2), masked=st.booleans())
def test_the_positions_do_not_depend_on_the_micro_batch(cut, groups, masked):
    torch.manual_seed(cut)
    block = _block(11, 7, 2, 3, groups)
    mask = torch.rand(11, 7) < 0.7 if masked else None
    whole = _dense(block, _positions(11, 3.0), mask=mask)
    parts = _dense(block, _positions(11, 3.0), (cut,), mask)
    for side in ("input", "output"):
        assert torch.allclose(dense_matrix(whole[side]), dense_matrix(parts[side]), atol=1e-12)


def test_about_as_many_rows_are_read_as_were_asked_for(monkeypatch):
    x = torch.zeros(20, 50, 8)
    held = _positions(20, 4.0)
    held.start(slice(0, 20), None)
    assert held.subsample(x, 1, 10).index.numel() == 40  # 4 · 10 rows, two of every example
    assert held.subsample(x, 1, 1000).index is None
    assert _positions(20, 4.0).subsample(x[:0], 1, 10).index.numel() == 0
    monkeypatch.setattr(row_sampling, "LEAST_ROWS", 200)
    held.start(slice(0, 20), None)
    assert held.subsample(x, 1, 10).index.numel() == 200


def test_padding_is_not_counted_as_a_read_of_its_row():
    ids = torch.tensor([[3, 1, 0, 0], [2, 0, 0, 0]])
    block = Lookup(ids, randn(2, 4, 2) * (ids > 0).unsqueeze(-1), 5)
    values = _dense(block, _positions(2, None), mask=ids > 0)["input"].values
    counts = torch.tensor([0.0, 1, 1, 1, 0], dtype=F64) / 2
    assert torch.allclose(values, (counts + 0.5) * 3 / (3 + 5))


def test_a_module_that_is_used_twice_has_its_mask_twice():
    mask = torch.tensor([[True, False, False], [True, True, False]])
    held = _positions(2, None)
    held.start(slice(0, 2), mask)
    assert torch.equal(held.mask_of(6), mask.repeat(1, 2))
    assert held.mask_of(1) is None and held.mask_of(4) is None and held.mask_of(0) is None
