"""A norm is never below the norm of what is summed: random shapes, and positions that cancel."""

import math

import pytest
import torch

from dpkfc.linalg.blocks import (
    ConvBlock,
    Lookup,
    MaterializedGradients,
    Outer,
    PerExample,
    Tied,
    roundoff,
)
from dpkfc.linalg.linear_norms import rounding_of_second_pass
from dpkfc.linalg.metric import Eigenbasis, Kronecker
from dpkfc.linalg.norm_bounds import MAX_ROUNDING_FRACTION
from dpkfc.linalg.norms import per_example_norms
from dpkfc.linalg.row_norms import dot_rounding, exact_row_norms, row_norms
from dpkfc.linalg.sides import Dense, Identity
from tests.patching import patch_linalg


def root(d, condition, seed):
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
    values = torch.logspace(
        0, -0.5 * torch.log10(torch.tensor(condition)).item(), d, dtype=torch.float64
    )
    return Dense(((q * values) @ q.T).float(), 1.0)


def release_exactly(block, metric, method):
    """(norms, exact float64 norm of each example's share of the whitened sum as float32 computes
    it).
    """
    found = per_example_norms(block, metric, method)
    n = found.norms.shape[0]
    shares = []
    for i in range(n):
        weights = torch.zeros(n)
        weights[i] = 1.0
        share = found.block.weighted_sum(weights)
        share = share if found.whitened else metric.apply(share)
        shares.append(torch.linalg.vector_norm(share.double()))
    return found.norms.double(), torch.stack(shares)


@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.parametrize("method", ["gram", "materialised"])
def test_gradients_too_large_to_keep_are_bounded_where_positions_cancel(kind, method):
    """Norm and sum are two passes in float32 there, and each rounds in its own way."""
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        if kind == "linear":
            big_a, big_b = (
                torch.randn(3, 3, 64, generator=g) * 1e4,
                torch.randn(3, 3, 64, generator=g) * 1e4,
            )
            a = torch.cat([big_a, -big_a], 1) + torch.randn(3, 6, 64, generator=g) * 1e-2
            block = Outer(a, torch.cat([big_b, big_b], 1))
        else:
            x = torch.randn(3, 32, 2, 2, generator=g) * 1e4
            b = torch.randn(3, 48, 2, 2, generator=g) * 1e4
            x[:, :, 1], b[:, :, 1] = -x[:, :, 0] + 1e-2, b[:, :, 0]
            block = ConvBlock(x, b, (1, 1), (1, 1), (0, 0), (1, 1), 1, True, False)
        d_in, d_out = (64, 64) if kind == "linear" else (block.d_in, 48)
        norms, exact = release_exactly(
            block, Kronecker(root(d_in, 1e4, seed), root(d_out, 1e4, seed + 1)), method
        )
        assert bool((norms >= exact * (1 - 1e-6)).all())


@pytest.mark.parametrize("shape", [(700, 2, 301), (3, 100_003), (0, 4), (5, 0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_norms_of_many_rows_equal_those_of_each(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.allclose(exact_row_norms(x), x.double().square().sum(-1).sqrt(), rtol=1e-14)


@pytest.mark.parametrize("shape", [(3, 5), (700, 64), (2, 9, 301), (3, 100_003), (0, 4), (5, 0)])
@pytest.mark.parametrize("magnitude", [1.0, 1e-25, 1e25])
def test_upper_bounds_of_long_rows_are_tight(shape, magnitude):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * magnitude
    x[..., 1::3] = 0.0
    x[..., 64:200] = 0.0
    exact = exact_row_norms(x)
    bounds = row_norms(x)
    assert bool((bounds >= exact).all())
    assert bool((bounds <= exact * (1 + 1e-5)).all())


@pytest.mark.parametrize("magnitude", [1.0, 1e-25, 1e25])
def test_upper_bounds_of_rows_that_lie_as_columns_are_tight(magnitude):
    x = (torch.randn(2, 301, 9, generator=torch.Generator().manual_seed(0)) * magnitude).mT
    exact = exact_row_norms(x)
    bounds = row_norms(x)
    assert bool((bounds >= exact * (1 - 1e-12)).all())
    assert bool((bounds <= exact * (1 + 1e-5)).all())
    assert torch.allclose(bounds, row_norms(x.contiguous()), rtol=1e-5)


@pytest.mark.parametrize(("d_in", "d_out"), [(64, 64), (300, 20), (512, 200)])
@pytest.mark.parametrize("whiten", [False, True])
def test_an_example_alone_has_the_bound_of_one_among_others(d_in, d_out, whiten):
    """Where rows are proved their norms come from rows, otherwise from gradients."""
    g = torch.Generator().manual_seed(0)
    a = torch.randn(2, 1, d_in, generator=g)
    b = torch.randn(2, 1, d_out, generator=g)
    metric = Kronecker(root(d_in, 1e2, 0), root(d_out, 1e2, 1)) if whiten else Kronecker()
    together = per_example_norms(Outer(a, b), metric).norms
    alone = per_example_norms(MaterializedGradients(b.mT @ a), metric).norms
    torch.testing.assert_close(alone, together, rtol=2e-5, atol=0.0)


def flat_row(d, seed):
    """The direction `[d]` that `root` maps to almost nothing."""
    return directions(d, seed)[:, -1].float()


def directions(d, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q


def eigenbasis(d, seed):
    """The map of two roots, scale by scale."""
    values = torch.logspace(0, -4.5, d)
    q_in, q_out = (directions(d, one).float() for one in (seed, seed + 1))
    return Eigenbasis(torch.outer(values, values), q_in, q_out)


@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.parametrize("method", ["gram", "materialised", "eigenbasis"])
@pytest.mark.parametrize("d", [8, 48])
def test_gradients_along_flat_directions_are_bounded(kind, method, d, monkeypatch):
    """What a map shrinks by 1e4 and more is mostly rounding, which differs from pass to pass."""
    for rule in ("is_kept", "is_always_kept"):
        patch_linalg(monkeypatch, rule, lambda *_: False)
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        sizes = torch.rand(3, 2, 1, generator=g) + 1
        a, b = sizes * flat_row(d, seed), sizes.flip(1) * flat_row(d, seed + 1)
        block = Outer(a, b)
        if kind == "convolution":
            x, y = (rows.mT.reshape(3, d, 2, 1).contiguous() for rows in (a, b))
            block = ConvBlock(x, y, (1, 1), (1, 1), (0, 0), (1, 1), 1, True, False)
        metric = Kronecker(root(d, 1e9, seed), root(d, 1e9, seed + 1))
        norms, exact = release_exactly(
            block,
            eigenbasis(d, seed) if method == "eigenbasis" else metric,
            "materialised" if method == "eigenbasis" else method,
        )
        assert bool((norms >= exact * (1 - 1e-6)).all())


# -- what rounding may take, for rows whose exact norms are known ----------------------------------


@pytest.mark.parametrize(
    ("method", "positions"), [("rank-one", 1), ("gram", 1), ("gram", 2), ("gram", 3)]
)
def test_the_slack_counts_the_positions_that_have_a_gradient(method, positions):
    d, padded = 40, 1 if method == "rank-one" else 5
    a, b = torch.zeros(1, padded, d), torch.zeros(1, padded, d)
    a[:, :, 0] = 1
    b[:, :positions, 0] = 1
    norm = per_example_norms(Outer(a, b), None, method).norms
    units = ((norm / positions).square() - 1) / roundoff(a)
    of_rows = 0
    if positions == 1:  # the bounds of both rows, too
        terms = d if method == "rank-one" else d + 1
        of_rows = 2 * 2 * (terms + 2)
    assert round(float(units)) == of_rows + positions + 2 * d


@pytest.mark.parametrize("sides", [(), ("input",), ("output",), ("input", "output")])
def test_the_slack_counts_the_rotations_of_an_eigenbasis(sides):
    d = 40
    row = torch.eye(d)[:1].view(1, 1, d)
    metric = Eigenbasis(torch.ones(d, d), **{side: torch.eye(d) for side in sides})
    norm = per_example_norms(Outer(row, row), metric).norms
    squares = 2 * d + 8
    rotations = 4 * (len(sides) * math.sqrt(2 * d) + 1)
    second_pass = 1 + 16 * math.sqrt(d)
    units = (norm - 1) / roundoff(row)
    assert float(units) == pytest.approx(squares + rotations + second_pass, rel=1e-4)


def test_the_slack_of_a_tied_weight_in_an_eigenbasis_counts_uses_and_rotations():
    d, rows = 40, 60
    c, b = torch.eye(d)[:1].view(1, 1, d), torch.eye(rows)[:1].view(1, 1, rows)
    block = Tied(Lookup(torch.zeros(1, 2).long(), c.repeat(1, 2, 1), rows), Outer(c, b))
    norm = per_example_norms(block, Eigenbasis(torch.ones(rows, d))).norms
    units = (norm / 3 - 1) / roundoff(c)
    assert 3 + 8 * math.sqrt(d + rows) <= float(units) <= 6 + 8 * math.sqrt(d + rows) * 1.01


def test_the_slack_of_a_tied_weight_in_a_dense_metric_counts_uses_and_the_map():
    d, rows = 40, 60
    c, b = torch.eye(d)[:1].view(1, 1, d), torch.eye(rows)[:1].view(1, 1, rows)
    block = Tied(Lookup(torch.zeros(1, 2).long(), c.repeat(1, 2, 1), rows), Outer(c, b))
    norm = per_example_norms(block, Kronecker(Dense(torch.eye(d), 1.0)), "materialised").norms
    units = (norm / 3 - 1) / roundoff(c)
    terms = 3 + 4 * (math.sqrt(d) + math.sqrt(rows)) + 2 * math.sqrt(d * rows)
    assert float(units) == pytest.approx(terms, rel=1e-3)


def test_the_slack_of_a_table_counts_a_map_of_its_columns():
    d = 40
    block = Lookup(torch.zeros(1, 1).long(), torch.eye(d)[:1].view(1, 1, d), 5)
    plain = per_example_norms(block, Kronecker()).norms
    mapped = per_example_norms(block, Kronecker(output=Dense(torch.eye(d), 1.0))).norms
    units = (mapped - plain) / roundoff(block.b)
    assert float(units) == pytest.approx(4 * math.sqrt(d), rel=1e-3)


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.float32, torch.float64)])
def test_the_slack_of_gradients_by_role_counts_their_entries_in_the_coarsest_type(dtypes):
    weight = torch.zeros(1, 20, 20, dtype=dtypes[0])
    weight[0, 0, 0] = 1
    block = PerExample({"weight": weight, "bias": torch.zeros(1, 500, dtype=dtypes[1])})
    norm = per_example_norms(block, None).norms
    units = (norm / row_norms(weight.flatten(1)) - 1) / 2.0**-24
    assert float(units) == pytest.approx(2 * math.sqrt(900), rel=1e-3)


@pytest.mark.parametrize("metric", [Kronecker(Identity(2.0)), Eigenbasis(2 * torch.ones(30, 30))])
def test_the_slack_of_a_second_pass_counts_positions_and_entries(metric):
    block = Outer(torch.ones(1, 3, 30), torch.ones(1, 3, 30))
    plain, magnitudes, positions = (torch.tensor([x]).double() for x in (5.0, 7.0, 3.0))
    entries = 2 * 30 if isinstance(metric, Kronecker) else 16 * math.sqrt(30)
    found = rounding_of_second_pass(block, metric, plain, magnitudes, positions)
    units = float(found) / roundoff(block.b)
    assert units == pytest.approx(2 * (3 * 7 + entries * 5), rel=1e-12)


def with_padding(rows, count):
    return torch.cat([rows, rows.new_zeros(len(rows), count, rows.shape[2])], 1)


def padded_blocks(kind, count):
    """The same example alone, and padded as next to a longer one: padding has no gradient."""
    g = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(2, 3, d, generator=g) for d in (40, 50, 40))
    outer = Outer(torch.cat([a, torch.ones(2, count, 40)], 1), with_padding(b, count))
    ids = torch.arange(3 + count).remainder(5).expand(2, -1)
    lookup = Lookup(ids, with_padding(c, count), 50)
    return {"linear": outer, "table": lookup, "tied": Tied(lookup, outer)}[kind]


@pytest.mark.parametrize("kind", ["linear", "table", "tied"])
@pytest.mark.parametrize("form", ["plain", "dense", "eigenbasis"])
def test_padding_of_longer_neighbours_moves_no_bound(kind, form, monkeypatch):
    for rule in ("is_kept", "is_always_kept"):
        patch_linalg(monkeypatch, rule, lambda *_: False)
    q = directions(40, 0).float()
    d_in, d_out = (50, 40) if kind == "table" else (40, 50)
    metric = {
        "plain": Kronecker(),
        "dense": Kronecker(output=Dense(q, 1.0)) if kind == "table" else Kronecker(Dense(q, 1.0)),
        "eigenbasis": Eigenbasis(torch.ones(d_out, d_in)),
    }[form]
    alone, padded = (
        per_example_norms(padded_blocks(kind, count), metric, "materialised").norms
        for count in (0, 40)
    )
    torch.testing.assert_close(padded, alone, rtol=3e-7, atol=0.0)


def cancel(n, d, generator):
    """Rows `[1, 2n, d]` of which each has its opposite, times numbers of different sizes."""
    rows = torch.randn(1, n, d, generator=generator)
    rows *= torch.logspace(0, 3, n)[:, None]
    return torch.cat([rows, -rows], 1)


@pytest.mark.parametrize("kind", ["linear", "tied"])
def test_a_bound_does_not_follow_the_order_of_positions_that_cancel(kind):
    g = torch.Generator().manual_seed(0)
    t, d, rows = 6, 8, 5
    a, b = cancel(t // 2, d, g), torch.randn(1, t // 2, rows, generator=g).repeat(1, 2, 1)
    magnitude = (exact_row_norms(a) * exact_row_norms(b)).sum()
    uses = t
    bounds, shares = [], []
    for _ in range(20):
        order = torch.randperm(t, generator=g)
        block = Outer(a[:, order], b[:, order])
        if kind == "tied":
            block = Tied(Lookup(torch.zeros(1, t).long(), a[:, order], rows), block)
        norms, exact = release_exactly(block, Kronecker(), "materialised")
        bounds.append(norms)
        shares.append(exact)
    if kind == "tied":
        uses = 2 * t
        magnitude += exact_row_norms(a).sum()
    assert min(bounds) >= max(shares)
    torch.testing.assert_close(min(bounds), max(bounds), rtol=1e-12, atol=0.0)
    least = uses**0.5 * roundoff(a) / MAX_ROUNDING_FRACTION * magnitude
    assert min(bounds) >= least * (1 - 1e-6)


def looked_up(size):
    """Two reads of one row whose gradients almost cancel."""
    g = torch.Generator().manual_seed(0)
    c = torch.randn(4, 1, 16, generator=g)
    c = torch.cat([c, 1e-4 * torch.randn(4, 1, 16, generator=g) - c], 1) * size
    return Lookup(torch.ones(4, 2).long(), c, 40)


def tied(size):
    """A read of a row and a use in a linear layer, whose gradients almost cancel."""
    lookup = looked_up(1.0)
    b = torch.zeros(4, 1, 40)
    b[:, :, 1] = 1 / size
    outer = Outer(lookup.b[:, 1:] * size, b)
    return Tied(Lookup(lookup.ids[:, :1], lookup.b[:, :1], 40), outer)


@pytest.mark.parametrize("size", [1.0, 1e-25])
@pytest.mark.parametrize("make", [looked_up, tied])
def test_sums_of_rows_that_cancel_are_as_exact_as_their_slack_says(make, size):
    block = make(size)
    exact = exact_row_norms(block.double().per_example().flatten(1)).square()
    if make is tied:
        magnitudes = exact_row_norms(block.lookup.b).sum(1) + exact_row_norms(
            block.outer.a[:, 0] * block.outer.b[:, 0, 1:2]
        )
        slack = (dot_rounding(16) + dot_rounding(40) + 4) * magnitudes.square()
    else:
        slack = (2 + 16) * exact_row_norms(block.b).sum(1).square()
    norms = per_example_norms(block, None, "gram").norms
    torch.testing.assert_close(
        norms.square(), exact + roundoff(block.like) * slack, rtol=1e-5, atol=0.0
    )


@pytest.mark.parametrize(
    "block",
    [
        Lookup(torch.ones(1, 1).long(), torch.full((1, 1, 4), 1e-25), 40),
        Tied(
            Lookup(torch.ones(1, 1).long(), torch.zeros(1, 1, 4), 40),
            Outer(torch.full((1, 1, 4), 1e-25), torch.full((1, 1, 40), 1e20)),
        ),
    ],
    ids=["lookup", "tied"],
)
def test_products_that_are_too_small_for_float32_count(block):
    norms = per_example_norms(block, None, "gram").norms
    exact = exact_row_norms(block.double().per_example().flatten(1))
    assert bool((norms >= exact).all()) and bool((norms <= exact * 1.01).all())
