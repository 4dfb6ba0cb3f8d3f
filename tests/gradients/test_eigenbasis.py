"""Norms and clipped sums in an eigenbasis metric against the explicit matrix on vec(g), for every
kind of block.
"""

import pytest
import torch
from torch.testing import assert_close

from dpkfc.linalg.blocks import ConvBlock, Lookup, Outer, Tied
from dpkfc.linalg.eigenbasis_norms import eigenbasis_norms_of_one_position
from dpkfc.linalg.metric import Eigenbasis
from dpkfc.linalg.norms import per_example_norms
from tests.models import draw

F64 = torch.float64


def basis(d, generator):
    return torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=F64)).Q


def entry(d_in, d_out, seed=0, turns="both", condition=30.0):
    generator = torch.Generator().manual_seed(seed)
    scale = condition ** -torch.rand(d_out, d_in, generator=generator, dtype=F64)
    return Eigenbasis(
        scale,
        basis(d_in, generator) if turns in ("both", "input") else None,
        basis(d_out, generator) if turns in ("both", "output") else None,
    )


def explicit(of):
    """The map as one matrix on the row-major vec of a `[d_out, d_in]` gradient."""
    d_out, d_in = of.scale.shape
    eye = torch.eye
    q_in = eye(d_in, dtype=F64) if of.input is None else of.input.double()
    q_out = eye(d_out, dtype=F64) if of.output is None else of.output.double()
    q = torch.kron(q_out.contiguous(), q_in.contiguous())
    return q @ torch.diag(of.scale.double().flatten()) @ q.T


def exact_norms(gradients, of, groups=1):
    z = gradients.double().flatten(1) @ explicit(of)
    return z.square().sum(1).view(-1, groups).sum(1).sqrt()


def single(of):
    """The same map in float32."""
    tensors = (of.scale, of.input, of.output)
    return Eigenbasis(*(None if x is None else x.float() for x in tensors))


BLOCKS = {
    "one position": lambda dt: Outer(draw(5, 1, 6, dtype=dt), draw(5, 1, 4, seed=1, dtype=dt)),
    "one position, bias": lambda dt: Outer(
        draw(5, 1, 6, dtype=dt), draw(5, 1, 4, seed=1, dtype=dt), homogeneous=True
    ),
    "positions, kept": lambda dt: Outer(
        draw(5, 9, 3, dtype=dt), draw(5, 9, 4, seed=1, dtype=dt), homogeneous=True
    ),
    "positions, formed twice": lambda dt: Outer(
        draw(5, 2, 9, dtype=dt), draw(5, 2, 8, seed=1, dtype=dt)
    ),
    "one position, groups": lambda dt: Outer(
        draw(10, 1, 3, dtype=dt), draw(10, 1, 4, seed=1, dtype=dt), 2
    ),
    "positions, groups": lambda dt: Outer(
        draw(10, 3, 3, dtype=dt), draw(10, 3, 4, seed=1, dtype=dt), 2
    ),
    "convolution": lambda dt: ConvBlock(
        draw(3, 2, 4, 5, dtype=dt),
        draw(3, 4, 4, 5, seed=1, dtype=dt),
        (3, 3),
        (1, 1),
        (1, 1),
        (1, 1),
        1,
        True,
        True,
    ),
    "convolution, groups": lambda dt: ConvBlock(
        draw(3, 4, 2, 2, dtype=dt),
        draw(3, 6, 1, 1, seed=1, dtype=dt),
        (2, 2),
        (1, 1),
        (0, 0),
        (1, 1),
        2,
        True,
        False,
    ),
}


def dims(block):
    return block.d_in, block.d_out if isinstance(block, ConvBlock) else block.b.shape[2]


@pytest.mark.parametrize("turns", ["both", "input", "output", "none"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_norms_and_sums_equal_the_explicit_matrix(kind, turns):
    block = BLOCKS[kind](F64)
    metric = entry(*dims(block), turns=turns)
    found = per_example_norms(block, metric)
    gradients, groups = block.per_example(), block.groups
    assert_close(found.norms, exact_norms(gradients, metric, groups), rtol=1e-11, atol=0)
    weights = torch.linspace(-1, 2, len(found.norms), dtype=F64)
    total = found.block.weighted_sum(weights)
    d_out, d_in = metric.scale.shape
    z = (gradients.flatten(1) @ explicit(metric)).view(-1, groups, d_out, d_in)
    expected = torch.einsum("n,ngoi->goi", weights, z).flatten(0, 1)
    whitened = (
        total if found.whitened else metric.apply(total.view(groups, d_out, d_in)).flatten(0, 1)
    )
    assert_close(whitened, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("output", [False, True])
def test_tables_equal_the_explicit_matrix(output):
    ids = torch.tensor([[0, 3, 0, 1], [2, 2, 2, 2], [4, 1, 3, 0]])
    block = Lookup(ids, draw(3, 4, 3), 5)
    metric = entry(5, 3, turns="output" if output else "none")
    exact = exact_norms(block.per_example().mT, metric)
    assert_close(per_example_norms(block, metric).norms, exact, rtol=1e-10, atol=0)
    with pytest.raises(ValueError, match="cannot be rotated"):
        per_example_norms(block, entry(5, 3))


@pytest.mark.parametrize("turns", ["both", "none"])
@pytest.mark.parametrize(("s", "t"), [(3, 2), (3, 0), (0, 2)])
def test_tied_tables_equal_the_explicit_matrix(s, t, turns):
    ids = torch.randint(0, 5, (4, s), generator=torch.Generator().manual_seed(2))
    block = Tied(Lookup(ids, draw(4, s, 3), 5), Outer(draw(4, t, 3, seed=1), draw(4, t, 5, seed=2)))
    metric = entry(3, 5, turns=turns)
    exact = exact_norms(block.per_example(), metric)
    assert_close(per_example_norms(block, metric).norms, exact, rtol=1e-10, atol=0)


# -- upper bounds in float32 -----------------------------------------------------------------------


@pytest.mark.parametrize("turns", ["both", "none"])
@pytest.mark.parametrize(("small", "large"), [(1e-23, 1e30), (1e-30, 1e25), (1e20, 1e15)])
def test_squares_of_tiny_and_huge_rows_neither_vanish_nor_overflow(small, large, turns):
    block = Outer(torch.full((2, 1, 4), small), torch.full((2, 1, 3), large))
    metric = single(entry(4, 3, turns=turns))
    exact = exact_norms(block.b.double().mT @ block.a.double(), metric)
    assert_close(eigenbasis_norms_of_one_position(block, metric), exact, rtol=1e-4, atol=0)
    assert bool((per_example_norms(block, metric).norms >= exact * (1 - 1e-6)).all())
