"""Second moments of gradients against formed gradients."""

import pytest
import torch
from torch.testing import assert_close

from dpkfc.curvature.gradient_moments import squared_gradients, summed_gradients
from dpkfc.linalg.blocks import Lookup, Outer, PerExample, Tied
from tests.models import draw

IDS = torch.tensor([[0, 3, 0, 1], [2, 2, 2, 2], [4, 1, 3, 0]])
BLOCKS = {
    "one position": Outer(draw(5, 1, 4), draw(5, 1, 3, seed=1), homogeneous=True),
    "positions": Outer(draw(5, 6, 4), draw(5, 6, 3, seed=1)),
    "groups": Outer(draw(6, 3, 4), draw(6, 3, 2, seed=1), 2),
    "lookup": Lookup(IDS, draw(3, 4, 2), 5),
    "tied": Tied(
        Lookup(IDS, draw(3, 4, 2), 5), Outer(draw(3, 2, 2, seed=1), draw(3, 2, 5, seed=2))
    ),
}


def _moments(block, per):
    if per == "example":
        return squared_gradients(block)
    return summed_gradients(block).square(block.batch_size)


@pytest.mark.parametrize("per", ["example", "batch"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_moments_equal_formed_gradients(kind, per):
    block = BLOCKS[kind]
    g = block.per_example()
    g = g.mT if kind == "lookup" else g
    groups = block.groups if isinstance(block, Outer) else 1
    g = g.view(-1, groups, *g.shape[1:]) if groups > 1 else g.unsqueeze(1)
    exact = g.square().mean((0, 1)) if per == "example" else g.mean(0).square().mean(0)
    found = _moments(block, per)
    assert_close(found.mean["weight"], exact, rtol=1e-12, atol=1e-14)
    twice = found + found
    assert_close(twice.mean["weight"], exact, rtol=1e-12, atol=1e-14)
    assert_close(found.entry({"weight": exact}).apply(g[0, 0]), exact * g[0, 0])


@pytest.mark.parametrize("per", ["example", "batch"])
def test_small_parameters_keep_their_roles(per):
    block = PerExample({"weight": draw(4, 3), "bias": draw(4, 2, 2, seed=1)})
    found = _moments(block, per)
    for role, g in block.grads.items():
        exact = g.square().mean(0) if per == "example" else g.mean(0).square()
        assert_close(found.mean[role], exact)


def test_gradients_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="NaN or infinity"):
        _moments(Outer(torch.full((1, 1, 2), float("inf")), torch.ones(1, 1, 2)), "batch")
