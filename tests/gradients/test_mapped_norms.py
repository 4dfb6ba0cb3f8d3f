"""Norms by coordinates along the columns of a side are the norms of mapped gradients, or above."""

import pytest
import torch
from torch.testing import assert_close

from dpkfc.linalg.blocks import ConvBlock, MaterializedGradients
from dpkfc.linalg.mapped_norms import mapped_norms
from dpkfc.linalg.metric import Kronecker
from dpkfc.linalg.norms import per_example_norms
from dpkfc.linalg.row_norms import exact_row_norms, row_norms
from dpkfc.linalg.sides import LowRank
from dpkfc.linalg.thin_products import multiply
from tests.gradients.whitened import side


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def thin(d, scale, k=5, tail=1.0, seed=0):
    vectors = torch.linalg.qr(random(d, k, dtype=torch.float64, seed=seed)).Q
    return LowRank(vectors.float(), torch.full((k,), scale), tail)


def exact_norms(g, metric):
    """In float64, by matrices that are written out."""
    sides = []
    for one, d in ((metric.output, g.shape[1]), (metric.input, g.shape[2])):
        eye = torch.eye(d, dtype=torch.float64)
        v = one.vectors.double()
        sides.append(one.tail * eye + (v * (one.scale.double() - one.tail)) @ v.T)
    z = sides[0] @ g.double() @ sides[1]
    return exact_row_norms(z.flatten(1))


@pytest.mark.parametrize("output", ["identity", "diagonal", "dense", "lowrank"])
@pytest.mark.parametrize("into", ["identity", "dense", "lowrank"])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_norms_equal_the_norms_of_mapped_gradients(into, output, n):
    torch.manual_seed(0)
    metric = Kronecker(side(into, 40), side(output, 30))
    g = random(n, 30, 40, dtype=torch.float64)
    found = mapped_norms(g, row_norms(g.flatten(1)), metric)
    assert_close(found, exact_row_norms(metric.apply(g).flatten(1)), rtol=1e-11, atol=0)


@pytest.mark.parametrize("scale", [1e-4, 0.1, 30.0])
@pytest.mark.parametrize("share", [0.0, 1e-3, 0.3])
@pytest.mark.parametrize("magnitude", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("both", [False, True])
def test_gradients_that_a_side_shrinks_keep_an_upper_bound(scale, share, magnitude, both):
    """Most of such a gradient lies along the columns, and terms cancel."""
    metric = Kronecker(thin(300, scale), thin(200, scale if both else 1.0, seed=1))
    inside = metric.output.vectors @ random(4, 5, 5, seed=2) @ metric.input.vectors.T
    g = (inside + share * random(4, 200, 300, seed=3) / 250) * magnitude
    g[1] = 0.0
    exact = exact_norms(g, metric)
    found = mapped_norms(g, row_norms(g.flatten(1)), metric)
    rounding = 1e-5 * metric.operator_norm * exact_row_norms(g.flatten(1))
    assert bool((found >= exact - rounding).all())
    assert bool((found <= exact * 1.001 + rounding).all())


def test_a_norm_from_coordinates_counts_what_they_may_lose():
    """Norms that are given exactly leave no room of their own."""
    metric = Kronecker(thin(300, 0.05), thin(8, 1.0, seed=1))
    inside = random(500, 8, 5, seed=2) @ metric.input.vectors.T
    g = inside + 0.1 * random(500, 8, 300, seed=3)
    found = mapped_norms(g, exact_row_norms(g.flatten(1)), metric)
    assert bool((found >= exact_norms(g, metric)).all())


def test_columns_that_are_not_orthonormal_let_nothing_more_through():
    whole = thin(60, 0.2)
    bent = LowRank(whole.vectors * 3, whole.scale, whole.tail)
    g = random(4, 20, 60)
    z = Kronecker(LowRank(bent.vectors.double(), bent.scale.double(), 1.0)).apply(g.double())
    exact = exact_row_norms(z.flatten(1))
    found = mapped_norms(g, row_norms(g.flatten(1)), Kronecker(bent))
    assert bool((found >= exact * (1 - 1e-6)).all())


def test_a_gradient_that_is_not_finite_changes_no_other_norm():
    metric = Kronecker(thin(60, 0.2))
    g = random(3, 20, 60)
    alone = mapped_norms(g, row_norms(g.flatten(1)), metric)
    g[1, 2, 3] = torch.nan
    among = mapped_norms(g, row_norms(g.flatten(1)), metric)
    assert among[1].isnan()
    assert_close(among[[0, 2]], alone[[0, 2]], rtol=1e-6, atol=0)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1)])
def test_a_whitened_convolution_releases_no_more_than_its_bound(both, kernel):
    d_in = 16 * kernel[0] * kernel[1]
    metric = Kronecker(thin(d_in, 1e-3), *([thin(24, 1e-3, seed=1)] if both else []))
    x = random(3, 16, 12, 12) + 3.0
    pad = (kernel[0] // 2,) * 2
    b = random(3, 24, 12, 12, seed=1)
    block = ConvBlock(x, b, kernel, (1, 1), pad, (1, 1), 1, True, False)
    found = per_example_norms(block, metric, "materialised")
    assert isinstance(found.block, MaterializedGradients) and not found.whitened
    for i, bound in enumerate(found.norms):
        share = metric.apply(found.block.weighted_sum(torch.eye(3)[i]))
        norm = torch.linalg.vector_norm(share, dtype=torch.float64)
        assert norm <= bound <= norm * 1.01


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("views", [1, 3])
def test_coordinates_of_patches_equal_a_product_of_written_patches(dims, groups, bias, views):
    x = random(2 * views, 4, *[7] * dims, dtype=torch.float64)
    positions = (7 + 2 - 2 * 2 - 1) // 2 + 1
    b = random(2 * views, 6, *[positions] * dims, dtype=torch.float64, seed=1)
    settings = [(size,) * dims for size in (3, 2, 1, 2)]
    block = ConvBlock(x, b, *settings, groups, True, bias, views)
    vectors = random(block.d_in, 5, dtype=torch.float64, seed=2)
    assert_close(block.project_patches(vectors), (block.outer().a @ vectors).mT)


@pytest.mark.parametrize("n", [0, 1, 127, 128, 141, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_thin_product_equals_the_product(n, dtype):
    rows, matrix = random(n, 70, dtype=dtype), random(70, 6, dtype=dtype, seed=1)
    assert_close(multiply(rows, matrix), rows @ matrix)
    assert_close(multiply(rows[:, :6].contiguous(), matrix.T), rows[:, :6] @ matrix.T)
    assert_close(multiply(rows[:, 3:], matrix[3:]), rows[:, 3:] @ matrix[3:])
