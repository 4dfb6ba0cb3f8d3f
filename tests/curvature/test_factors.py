import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpkfc.curvature.eigen import Eigen
from dpkfc.curvature.factor_sums import FactorAccumulator
from dpkfc.curvature.factors import DiagonalFactor, IsotropicFactor
from dpkfc.curvature.layer_factors import FactorOptions, LayerAccumulator, LayerFactors
from dpkfc.linalg.blocks import Lookup, Outer, PerExample
from tests.curvature.toys import dense_matrix, kronecker_factors
from tests.models import randn


def _outer(n=5, t=3, d_in=4, d_out=6, groups=1):
    a = randn(n * groups, t, d_in)
    a[..., -1] = 1.0
    return Outer(a, randn(n * groups, t, d_out), groups)


def _factors(block, structure=None, rule=None):
    layer = LayerAccumulator(block, structure or FactorOptions(), rule)
    layer.add(block)
    return layer.result()


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@given(
    n=st.integers(1, 6),
    t=st.integers(1, 4),
    d_in=st.integers(1, 9),
    d_out=st.integers(1, 9),
    groups=st.integers(1, 3),
)
def test_streamed_factors_equal_the_sum_written_out(sharing, n, t, d_in, d_out, groups):
    torch.manual_seed(n + 10 * t + 100 * d_in)
    block = _outer(n, t, d_in, d_out, groups)
    a_exact, g_exact = kronecker_factors(block, sharing)
    sides = _factors(block, FactorOptions(sharing=sharing)).sides
    assert torch.allclose(dense_matrix(sides["input"]), a_exact, atol=1e-9)
    assert torch.allclose(dense_matrix(sides["output"]), g_exact, atol=1e-9)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("ids", [[[0, 2, 2], [2, 4, 0]], [[2], [4]]])
def test_an_embedding_has_the_expected_row_counts(sharing, ids):
    ids = torch.tensor(ids)
    reads = ids.numel()
    block = Lookup(ids, torch.randn(*ids.shape, 5), num_rows=6)
    factors = _factors(block, FactorOptions(sharing=sharing))
    one_hot = torch.nn.functional.one_hot(ids, 6).double()
    if sharing == "expand":
        exact = one_hot.sum((0, 1)) / 2
    else:
        exact = one_hot.mean(1).square().mean(0)
    assert isinstance(factors.sides["input"], DiagonalFactor)
    # one more read of each of six rows
    exact = (exact + exact.sum() / reads) * reads / (reads + 6)
    assert torch.allclose(factors.sides["input"].values, exact)
    b = block.b.flatten(0, 1) if sharing == "expand" else block.b.sum(1)
    assert torch.allclose(dense_matrix(factors.sides["output"]), b.T @ b / b.shape[0], atol=1e-5)
    assert factors.kind == "lookup" and factors.shapes == {"input": (6,), "output": (5,)}


def test_materialised_gradients_give_their_second_moment():
    grads = {"weight": torch.randn(7, 2, 3), "bias": torch.randn(7, 3)}
    factors = _factors(PerExample(grads))
    assert factors.kind == "elementwise" and factors.shapes == {"weight": (2, 3), "bias": (3,)}
    for role, g in grads.items():
        assert torch.allclose(factors.sides[role].values, g.double().square().mean(0).flatten())


@pytest.mark.parametrize("size", [1e-25, 1e-12, 1.0, 1e15, 1e25])
@pytest.mark.parametrize("shape", ["full", "diagonal", "isotropic"])
def test_small_and_large_rows_neither_vanish_nor_overflow(size, shape):
    rows = torch.randn(40, 4)
    tiny, whole = FactorAccumulator(4, shape=shape), FactorAccumulator(4, shape=shape)
    for piece in rows.split(8):
        whole.add(piece, 8)
        tiny.add(piece * size, 8)
    assert tiny.result().trace == pytest.approx(whole.result().trace * size * size, rel=1e-5)


def test_a_later_larger_chunk_is_added_in_the_same_scale():
    rows = [torch.randn(6, 3), 1e6 * torch.randn(6, 3), 1e-6 * torch.randn(6, 3)]
    accumulator = FactorAccumulator(3)
    for piece in rows:
        accumulator.add(piece, 6)
    exact = sum(r.double().T @ r.double() for r in rows) / 18
    assert torch.allclose(
        dense_matrix(accumulator.result()).double(),
        exact,
        rtol=1e-4,
        atol=1e-4 * float(exact.max()),
    )


def test_a_wide_side_stays_low_rank_while_rows_are_few_and_falls_back_beyond_that():
    wide = FactorAccumulator(50, max_size=8)
    for _ in range(2):
        wide.add(torch.randn(4, 50), 4)
    assert (
        isinstance(wide.result(), Eigen)
        and wide.result().vectors.shape == (50, 8)
        and not wide.note
    )
    rows = torch.randn(12, 50)
    diagonal = FactorAccumulator(50, max_size=8)
    identity = FactorAccumulator(50, max_size=8, oversize="identity")
    for piece in rows.split(3):
        diagonal.add(piece, 3)
        identity.add(piece, 3)
    assert torch.allclose(diagonal.result().values, rows.double().square().mean(0))
    assert isinstance(identity.result(), IsotropicFactor)
    assert identity.result().mean == pytest.approx(diagonal.result().mean)
    assert "max_factor_size = 8" in diagonal.note and "isotropic" in identity.note


@pytest.mark.parametrize("sides", ["both", "input", "output"])
def test_the_other_side_becomes_isotropic_with_the_same_trace(sides):
    block = _outer()
    full, one = _factors(block), _factors(block, FactorOptions(sides=sides))
    for side in ("input", "output"):
        kept = sides in ("both", side)
        assert isinstance(one.sides[side], Eigen if kept else IsotropicFactor)
        assert one.sides[side].trace == pytest.approx(full.sides[side].trace)
        assert one.sides[side].dim == full.sides[side].dim


def test_rules_that_are_left_out_become_isotropic():
    structure = FactorOptions(only_rules=("linear",))
    assert isinstance(_factors(_outer(), structure, "linear").sides["input"], Eigen)
    left_out = _factors(_outer(), structure, "conv").sides
    assert all(isinstance(side, IsotropicFactor) for side in left_out.values())
    norm = _factors(PerExample({"weight": torch.randn(3, 4)}), structure, "norm").sides["weight"]
    assert isinstance(norm, IsotropicFactor)
    lookup = Lookup(torch.tensor([[0, 1]]), torch.randn(1, 2, 3), 4)
    counts = _factors(lookup, structure, "embedding").sides["input"]
    assert isinstance(counts, IsotropicFactor) and counts.trace == pytest.approx(2.0)


def test_an_isotropic_factor_without_a_trace_has_no_direction():
    assert IsotropicFactor(3, 0.0).rank == 0 and IsotropicFactor(3, 0.1).rank == 3


def test_bad_rows_are_named():
    accumulator = FactorAccumulator(3)
    with pytest.raises(ValueError, match=r"size 3.*\(2, 4\)"):
        accumulator.add(torch.zeros(2, 4), 2)
    with pytest.raises(ValueError, match="NaN or infinity"):
        accumulator.add(torch.tensor([[0.0, float("inf"), 1.0]]), 1)


@pytest.mark.parametrize("shape", ["full", "diagonal", "isotropic"])
def test_a_side_that_saw_no_position_has_no_direction(shape):
    assert FactorAccumulator(3, shape=shape).result() == IsotropicFactor(3, 0.0)


@pytest.mark.parametrize("mean", [0.1, 1 / 3, 3e-7, 49.0, 1e9])
def test_every_layer_has_the_same_output_side_where_inputs_alone_are_whitened(mean):
    """Layers that read the same rows then share the whitened ones."""
    sides = {"output": IsotropicFactor(7, mean)}
    layer = LayerFactors(
        kind="outer",
        sides=sides,
        shapes={},
        dtype=torch.float32,
        device=torch.device("cpu"),
        notes={},
    )
    assert layer.normalise().sides == {"output": IsotropicFactor(7, 1.0)}
