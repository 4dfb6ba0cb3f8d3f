"""Norms and clipped sums in an eigenbasis metric against the explicit matrix on vec(g), for every
kind of block.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layers import Layer
from dpkfc.linalg.blocks import ConvBlock, Lookup, Outer, Tied
from dpkfc.linalg.metric import Dense, Eigenbasis, Elementwise, Kronecker, Metric
from dpkfc.linalg.norms import eigenbasis_norms_of_one_position, per_example_norms
from tests.gradients.whitened import clipped, looped, matrix

F64 = torch.float64


def basis(d: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=F64)).Q


def entry(
    d_in: int, d_out: int, seed: int = 0, turns: str = "both", condition: float = 30.0
) -> Eigenbasis:
    generator = torch.Generator().manual_seed(seed)
    scale = condition ** -torch.rand(d_out, d_in, generator=generator, dtype=F64)
    return Eigenbasis(
        scale,
        basis(d_in, generator) if turns in ("both", "input") else None,
        basis(d_out, generator) if turns in ("both", "output") else None,
    )


def explicit(of: Eigenbasis) -> Tensor:
    """The map as one matrix on the row-major vec of a `[d_out, d_in]` gradient."""
    d_out, d_in = of.scale.shape
    eye = torch.eye
    q_in = eye(d_in, dtype=F64) if of.input is None else of.input.double()
    q_out = eye(d_out, dtype=F64) if of.output is None else of.output.double()
    q = torch.kron(q_out.contiguous(), q_in.contiguous())
    return q @ torch.diag(of.scale.double().flatten()) @ q.T


def exact_norms(gradients: Tensor, of: Eigenbasis, groups: int = 1) -> Tensor:
    z = gradients.double().flatten(1) @ explicit(of)
    return z.square().sum(1).view(-1, groups).sum(1).sqrt()


def single(of: Eigenbasis) -> Eigenbasis:
    """The same map in float32."""
    tensors = (of.scale, of.input, of.output)
    return Eigenbasis(*(None if x is None else x.float() for x in tensors))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


BLOCKS = {
    "one position": lambda dt: Outer(randn(5, 1, 6, dtype=dt), randn(5, 1, 4, seed=1, dtype=dt)),
    "one position, bias": lambda dt: Outer(
        randn(5, 1, 6, dtype=dt), randn(5, 1, 4, seed=1, dtype=dt), homogeneous=True
    ),
    "positions, kept": lambda dt: Outer(
        randn(5, 9, 3, dtype=dt), randn(5, 9, 4, seed=1, dtype=dt), homogeneous=True
    ),
    "positions, formed twice": lambda dt: Outer(
        randn(5, 2, 9, dtype=dt), randn(5, 2, 8, seed=1, dtype=dt)
    ),
    "one position, groups": lambda dt: Outer(
        randn(10, 1, 3, dtype=dt), randn(10, 1, 4, seed=1, dtype=dt), 2
    ),
    "positions, groups": lambda dt: Outer(
        randn(10, 3, 3, dtype=dt), randn(10, 3, 4, seed=1, dtype=dt), 2
    ),
    "convolution": lambda dt: ConvBlock(
        randn(3, 2, 4, 5, dtype=dt),
        randn(3, 4, 4, 5, seed=1, dtype=dt),
        (3, 3),
        (1, 1),
        (1, 1),
        (1, 1),
        1,
        True,
        True,
    ),
    "convolution, groups": lambda dt: ConvBlock(
        randn(3, 4, 2, 2, dtype=dt),
        randn(3, 6, 1, 1, seed=1, dtype=dt),
        (2, 2),
        (1, 1),
        (0, 0),
        (1, 1),
        2,
        True,
        False,
    ),
}


def dims(block: Outer | ConvBlock) -> tuple[int, int]:
    return block.d_in, block.d_out if isinstance(block, ConvBlock) else block.b.shape[2]


@pytest.mark.parametrize("turns", ["both", "input", "output", "none"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_norms_and_sums_equal_the_explicit_matrix(kind: str, turns: str) -> None:
    block = BLOCKS[kind](F64)
    metric = entry(*dims(block), turns=turns)
    found = per_example_norms(block, metric)
    gradients, groups = block.per_example(), block.groups
    torch.testing.assert_close(
        found.norms, exact_norms(gradients, metric, groups), rtol=1e-11, atol=0
    )
    weights = torch.linspace(-1, 2, len(found.norms), dtype=F64)
    total = found.block.weighted_sum(weights)
    d_out, d_in = metric.scale.shape
    z = (gradients.flatten(1) @ explicit(metric)).view(-1, groups, d_out, d_in)
    expected = torch.einsum("n,ngoi->goi", weights, z).flatten(0, 1)
    whitened = (
        total if found.whitened else metric.apply(total.view(groups, d_out, d_in)).flatten(0, 1)
    )
    torch.testing.assert_close(whitened, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("output", [False, True])
def test_tables_equal_the_explicit_matrix(output: bool) -> None:
    ids = torch.tensor([[0, 3, 0, 1], [2, 2, 2, 2], [4, 1, 3, 0]])
    block = Lookup(ids, randn(3, 4, 3), 5)
    metric = entry(5, 3, turns="output" if output else "none")
    exact = exact_norms(block.per_example().mT, metric)
    torch.testing.assert_close(per_example_norms(block, metric).norms, exact, rtol=1e-10, atol=0)
    with pytest.raises(ValueError, match="cannot be rotated"):
        per_example_norms(block, entry(5, 3))


@pytest.mark.parametrize("turns", ["both", "none"])
@pytest.mark.parametrize(("s", "t"), [(3, 2), (3, 0), (0, 2)])
def test_tied_tables_equal_the_explicit_matrix(s: int, t: int, turns: str) -> None:
    ids = torch.randint(0, 5, (4, s), generator=torch.Generator().manual_seed(2))
    block = Tied(
        Lookup(ids, randn(4, s, 3), 5), Outer(randn(4, t, 3, seed=1), randn(4, t, 5, seed=2))
    )
    metric = entry(3, 5, turns=turns)
    exact = exact_norms(block.per_example(), metric)
    torch.testing.assert_close(per_example_norms(block, metric).norms, exact, rtol=1e-10, atol=0)


def test_an_eigenbasis_of_factors_is_the_kronecker_metric() -> None:
    generator = torch.Generator().manual_seed(3)
    q_in, q_out = basis(5, generator), basis(4, generator)
    root_in, root_out = (
        torch.rand(5, generator=generator, dtype=F64) + 0.1,
        torch.rand(4, dtype=F64) + 0.1,
    )
    whole = Eigenbasis(torch.outer(root_out, root_in), q_in, q_out)
    sides = Kronecker(
        Dense((q_in * root_in) @ q_in.T, 1.1), Dense((q_out * root_out) @ q_out.T, 1.1)
    )
    g = randn(3, 4, 5)
    torch.testing.assert_close(whole.apply(g), sides.apply(g), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(whole.variance(), sides.variance(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(whole.inverse().apply(whole.apply(g)), g, rtol=1e-10, atol=1e-12)


def test_with_several_positions_a_clamped_product_is_no_gram_formula() -> None:
    """Vector 8.9: roots that are clamped a side at a time, or positions taken one by one, give
    other numbers.
    """
    generator = torch.Generator().manual_seed(4)
    q_in, q_out = basis(6, generator), basis(5, generator)
    values_in, values_out = torch.logspace(1, -4, 6, dtype=F64), torch.logspace(0, -3, 5, dtype=F64)
    floor = 1e-3
    metric = Eigenbasis(torch.outer(values_out, values_in).clamp(min=floor).rsqrt(), q_in, q_out)
    half = floor**0.5

    def side(q: Tensor, values: Tensor) -> Dense:
        root = values.clamp(min=half).rsqrt()
        return Dense((q * root) @ q.T, float(root.max()))

    block = Outer(randn(7, 3, 6), randn(7, 3, 5, seed=1))
    exact = exact_norms(block.per_example(), metric)
    torch.testing.assert_close(per_example_norms(block, metric).norms, exact, rtol=1e-11, atol=0)
    gram = per_example_norms(
        block, Kronecker(side(q_in, values_in), side(q_out, values_out)), "gram"
    ).norms
    one_by_one = sum(
        per_example_norms(
            Outer(block.a[:, t : t + 1], block.b[:, t : t + 1]), metric
        ).norms.square()
        for t in range(3)
    ).sqrt()
    for other in (gram, one_by_one):
        assert float(((other - exact).abs() / exact).min()) > 1e-3


# -- upper bounds in float32 -----------------------------------------------------------------------


def released(block, metric: Eigenbasis) -> tuple[Tensor, Tensor]:
    """(norms, exact float64 norm of each example's share of the whitened sum as float32 computes
    it).
    """
    found = per_example_norms(block, metric)
    shares = []
    for one in torch.eye(len(found.norms)):
        share = found.block.weighted_sum(one)
        if not found.whitened:
            whole = share.T if isinstance(block, Lookup) else share
            share = metric.apply(whole.view(getattr(block, "groups", 1), *metric.scale.shape))
        shares.append(torch.linalg.vector_norm(share.double()))
    return found.norms.double(), torch.stack(shares)


@given(
    kind=st.sampled_from(["one", "kept", "twice", "groups", "convolution", "lookup", "tied"]),
    magnitude=st.sampled_from([1.0, 1e3, 1e5]),
    condition=st.sampled_from([1.0, 1e2, 1e4]),
    seed=st.integers(0, 10_000),
)
def test_norms_are_upper_bounds_where_positions_cancel(
    kind: str, magnitude: float, condition: float, seed: int
) -> None:
    """Pairs ± of large rows plus a residual many digits below them."""

    def pairs(n: int, t: int, d: int, sign: int, seed: int) -> Tensor:
        big = randn(n, t // 2, d, seed=seed, dtype=torch.float32) * magnitude
        return torch.cat([big, sign * big], 1) + 1e-2 * randn(
            n, t, d, seed=seed + 1, dtype=torch.float32
        )

    d_in, d_out = (12, 9) if kind != "twice" else (24, 20)
    a, b = pairs(4, 8, d_in, -1, seed), pairs(4, 8, d_out, 1, seed + 2)
    if kind == "one":
        block = Outer(a[:, :1] * 1e-3, b[:, :1], homogeneous=seed % 2 == 0)
    elif kind in ("kept", "twice", "groups"):
        block = Outer(a, b, 2 if kind == "groups" else 1)
    elif kind == "convolution":
        x, c = (
            pairs(3, 2, 32, -1, seed).view(3, 4, 4, 4),
            pairs(3, 2, 48, 1, seed + 2).view(3, 6, 4, 4),
        )
        block = ConvBlock(x, c, (3, 3), (1, 1), (1, 1), (1, 1), 1, True, True)
    else:
        ids = torch.randint(0, 6, (4, 4), generator=torch.Generator().manual_seed(seed)).repeat(
            1, 2
        )
        c = pairs(4, 8, d_in, -1, seed + 4)
        block = (
            Lookup(ids, c, d_out) if kind == "lookup" else Tied(Lookup(ids, c, d_out), Outer(a, b))
        )
    if kind == "lookup":
        metric = single(entry(d_out, d_in, seed, "output", condition))
    else:
        sizes = (d_in, d_out) if kind == "tied" else dims(block)
        metric = single(entry(*sizes, seed, "both", condition))
    norms, exact = released(block, metric)
    assert bool((norms >= exact * (1 - 1e-6)).all()), (exact / norms).max()


@given(
    t=st.integers(1, 9),
    d_in=st.integers(1, 16),
    d_out=st.integers(1, 16),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    seed=st.integers(0, 10_000),
)
def test_norms_stay_close_where_nothing_cancels(
    t: int, d_in: int, d_out: int, scale: float, seed: int
) -> None:
    a, b = (
        randn(3, t, d_in, seed=seed, dtype=torch.float32),
        randn(3, t, d_out, seed=seed + 1, dtype=torch.float32),
    )
    norms, exact = released(Outer(a * scale, b), single(entry(d_in, d_out, seed, condition=10.0)))
    assert bool((norms >= exact * (1 - 1e-6)).all())
    assert bool((norms <= exact * (1 + 5e-3)).all()), (norms / exact).max()


@pytest.mark.parametrize("turns", ["both", "none"])
@pytest.mark.parametrize(("small", "large"), [(1e-23, 1e30), (1e-30, 1e25), (1e20, 1e15)])
def test_squares_of_tiny_and_huge_rows_neither_vanish_nor_overflow(
    small: float, large: float, turns: str
) -> None:
    block = Outer(torch.full((2, 1, 4), small), torch.full((2, 1, 3), large))
    metric = single(entry(4, 3, turns=turns))
    exact = exact_norms(block.b.double().mT @ block.a.double(), metric)
    torch.testing.assert_close(
        eigenbasis_norms_of_one_position(block, metric), exact, rtol=1e-4, atol=0
    )
    assert bool((per_example_norms(block, metric).norms >= exact * (1 - 1e-6)).all())


def test_a_broken_example_has_no_finite_norm_and_leaves_the_others_alone() -> None:
    block = BLOCKS["one position"](F64)
    a = block.a.clone()
    a[1] = float("nan")
    norms = per_example_norms(Outer(a, block.b), entry(6, 4)).norms
    plain = per_example_norms(block, entry(6, 4)).norms
    assert torch.isfinite(norms).tolist() == [True, False, True, True, True]
    torch.testing.assert_close(norms[2:], plain[2:], rtol=0, atol=0)


# -- through the whole pass ------------------------------------------------------------------------


class Small(nn.Module):
    """An embedding, a layer norm, a linear layer over positions, a grouped convolution and a
    head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.mix = nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 6, 2, groups=2)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.mix(self.norm(self.table(ids))))
        return self.head(torch.tanh(self.conv(x.mT)).mean(-1))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def mapped(layer: Layer, of: Eigenbasis | Elementwise, grads: dict[str, Tensor]) -> Tensor:
    """z of one example and layer, flattened, by the explicit matrix."""
    own = {role: grads[full] for role, full in layer.parameters.items()}
    if isinstance(of, Elementwise):
        return torch.cat([(g * of.scale[r]).flatten() for r, g in own.items()])
    g = own["weight"].T if layer.rule == "embedding" else matrix(layer, own)
    z = g.reshape(-1, of.scale.numel()) @ explicit(of)
    return z.view(-1, *of.scale.shape).mT.flatten() if layer.rule == "embedding" else z.flatten()


@pytest.mark.parametrize("clip", [0.3, 1e6])
def test_clipped_sums_equal_the_loop(clip: float) -> None:
    torch.manual_seed(0)
    model = Small().double()
    layers = find_layers(model)
    metric: Metric = {
        "table": entry(7, 4, 1, "output"),
        "norm": Elementwise({r: torch.rand(4, dtype=F64) + 0.2 for r in ("weight", "bias")}),
        "mix": entry(5, 4, 2),
        "conv": entry(2 * 2 + 1, 3, 3),
        "head": entry(7, 3, 4),
    }
    batch = (torch.randint(0, 7, (6, 5)), torch.randint(0, 3, (6,)))
    rows = [
        {x.name: mapped(x, metric[x.name], g) for x in layers}
        for g in looped(model, batch, loss_fn)
    ]
    exact = torch.stack([torch.cat(list(row.values())).norm() for row in rows])
    norms, total = clipped(model, layers, batch, loss_fn, clip, metric)
    torch.testing.assert_close(norms, exact, rtol=1e-9, atol=0)
    for layer in layers:
        expected = sum(
            min(1.0, clip / float(n)) * row[layer.name] for n, row in zip(exact, rows, strict=True)
        )
        own = {role: total[full] for role, full in layer.parameters.items()}
        if layer.rule == "norm":
            found = torch.cat([x.flatten() for x in own.values()])
        else:
            found = (own["weight"] if layer.rule == "embedding" else matrix(layer, own)).flatten()
        torch.testing.assert_close(
            found, expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=layer.name: f"{n}: {m}"
        )
