import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpkfc.curvature.damping import Damping, condition_numbers, damp_side, elementwise_scale
from dpkfc.curvature.eigen import Eigen, eigen_of_rows
from dpkfc.curvature.factors import DiagonalFactor, IsotropicFactor
from dpkfc.linalg.sides import Dense, Diagonal, Identity, LowRank
from tests.curvature.toys import dense_matrix, raise_to

F64 = torch.float64


def _eigen(d, n, scale=1.0):
    return eigen_of_rows(scale * torch.randn(n, d, dtype=F64)).scale_by(1 / n)


def _matrix(side, d):
    return side.apply(torch.eye(d, dtype=F64))


@pytest.mark.parametrize("p", [0.5, 0.25, 0.1])
@pytest.mark.parametrize("n", [3, 30])
def test_a_side_is_the_root_of_the_damped_factor(p, n):
    factor, d = _eigen(10, n), 10
    damping = Damping(value=0.1, exponent=p, rank_tolerance=0.0)
    exact = raise_to(dense_matrix(factor) + 0.1 * factor.mean * torch.eye(d, dtype=F64), -p)
    side = damp_side(factor, damping, F64)
    assert isinstance(side, LowRank if n == 3 else Dense)
    assert torch.allclose(_matrix(side, d), exact, atol=1e-10)
    assert side.operator_norm == pytest.approx(float(torch.linalg.matrix_norm(exact, 2)), rel=1e-9)


def test_a_wide_side_keeps_its_first_eigenpairs_and_its_trace():
    d, values = 24, torch.logspace(1, -1, 24, dtype=F64)
    side = damp_side(Eigen(torch.eye(d, dtype=F64), values), Damping(value=0.1, max_rank=5), F64)
    assert isinstance(side, LowRank) and side.scale.numel() == 5
    shift = 0.1 * float(values.mean())
    squared = torch.cat([side.scale, torch.full((d - 5,), side.tail, dtype=F64)]).pow(-2) - shift
    assert float(squared.sum()) == pytest.approx(float(values.sum()))
    narrow = damp_side(
        Eigen(torch.eye(19, dtype=F64), values[:19]), Damping(value=0.1, max_rank=5), F64
    )
    assert isinstance(narrow, Dense)
    # of 24: between a quarter of the width and the width, and beyond it
    for rank in (
        6,
        7,
        23,
        24,
        25,
        1000,
    ):
        kept = damp_side(
            Eigen(torch.eye(d, dtype=F64), values), Damping(value=0.1, max_rank=rank), F64
        )
        whole = damp_side(
            Eigen(torch.eye(d, dtype=F64), values), Damping(value=0.1, max_rank=None), F64
        )
        assert isinstance(kept, LowRank) == (rank == 6) and isinstance(whole, Dense)
        assert rank == 6 or torch.equal(kept.root, whole.root)
    for wrong in (0, 2.5, float("nan"), True):
        with pytest.raises(ValueError, match="max_rank must be an integer >= 1"):
            Damping(max_rank=wrong)


def test_eigenvalues_far_below_the_damping_are_the_tail():
    values = torch.tensor([10.0, 5.0, 1e-4, 1e-5, 0.0, 0.0], dtype=F64)
    side = damp_side(
        Eigen(torch.eye(6, dtype=F64), values), Damping(value=0.1, rank_tolerance=1e-2), F64
    )
    shift = 0.1 * float(values.sum()) / 6
    assert isinstance(side, LowRank) and side.scale.numel() == 2
    assert side.tail == pytest.approx((float(values[2:].sum()) / 4 + shift) ** -0.5)
    assert torch.allclose(side.scale, (values[:2] + shift).pow(-0.5))
    everything = damp_side(
        Eigen(torch.eye(6, dtype=F64), values), Damping(value=0.1, rank_tolerance=0.0), F64
    )
    assert torch.allclose(_matrix(side, 6), _matrix(everything, 6), rtol=6e-3, atol=0)


@given(rho=st.floats(1e-3, 2.0), a_scale=st.floats(1e-3, 1e3), g_scale=st.floats(1e-3, 1e3))
def test_relative_damping_is_the_balanced_split_of_one_damping(rho, a_scale, g_scale):
    torch.manual_seed(0)
    a, g = _eigen(5, 12, a_scale), _eigen(3, 12, g_scale)
    damping = Damping(value=rho)
    mean_a, mean_g = a.mean, g.mean
    lam, pi = rho**2 * mean_a * mean_g, math.sqrt(mean_a / mean_g)
    assert damping.shift(a) == pytest.approx(pi * math.sqrt(lam), rel=1e-9)
    assert damping.shift(g) == pytest.approx(math.sqrt(lam) / pi, rel=1e-9)


def test_absolute_damping_is_that_of_the_paper():
    factor = _eigen(6, 20)
    side = damp_side(
        factor, Damping(value=1e-2, gamma=3e-2, mode="absolute", rank_tolerance=0.0), F64
    )
    exact = raise_to(
        (dense_matrix(factor) + 1e-2 * torch.eye(6, dtype=F64)) + 3e-2 * torch.eye(6, dtype=F64),
        -0.5,
    )
    assert torch.allclose(_matrix(side, 6), exact, atol=1e-10)
    empty = Eigen(torch.zeros(6, 0, dtype=F64), torch.zeros(0, dtype=F64))
    bare = damp_side(empty, Damping(value=1e-2, gamma=3e-2, mode="absolute"), F64)
    assert bare == Identity(pytest.approx(5.0))


@pytest.mark.parametrize(
    "factor",
    [
        Eigen(torch.zeros(4, 0), torch.zeros(0, dtype=F64)),
        Eigen(torch.eye(4), torch.zeros(4, dtype=F64)),
        Eigen(torch.eye(4), torch.full((4,), 1e-43, dtype=F64)),
        DiagonalFactor(torch.zeros(4, dtype=F64)),
        IsotropicFactor(4, 0.0),
    ],
    ids=["no pairs", "zeros", "denormal", "diagonal", "isotropic"],
)
def test_an_empty_factor_is_the_identity_of_unit_scale(factor):
    assert damp_side(factor, Damping(), torch.float32) == Identity()
    assert elementwise_scale(factor, Damping(), (2, 2), torch.float32).tolist() == [
        [1.0, 1.0],
        [1.0, 1.0],
    ]


def test_diagonal_and_isotropic_sides():
    values = torch.tensor([4.0, 0.0, 2.0], dtype=F64)
    shift = 0.1 * 2.0
    side = damp_side(DiagonalFactor(values), Damping(), F64)
    assert isinstance(side, Diagonal) and torch.allclose(side.scale, (values + shift).pow(-0.5))
    assert damp_side(IsotropicFactor(3, 2.0), Damping(), F64) == Identity(pytest.approx(2.2**-0.5))
    scale = elementwise_scale(DiagonalFactor(values), Damping(exponent=0.25), (3, 1), torch.float32)
    assert scale.shape == (3, 1) and torch.allclose(
        scale[:, 0].double(), (values + shift).pow(-0.25)
    )
    flat = elementwise_scale(IsotropicFactor(6, 2.0), Damping(), (2, 3), torch.float32)
    assert flat.shape == (2, 3) and torch.allclose(flat, torch.full((2, 3), 2.2**-0.5))


def test_condition_numbers_before_and_after():
    factor = Eigen(torch.eye(2, dtype=F64), torch.tensor([8.0, 2.0], dtype=F64))
    assert condition_numbers(factor, Damping()) == (4.0, pytest.approx(8.5 / 2.5))
    low = Eigen(torch.eye(4, dtype=F64)[:, :1], torch.tensor([8.0], dtype=F64))
    assert condition_numbers(low, Damping()) == (math.inf, pytest.approx(8.2 / 0.2))
    assert condition_numbers(IsotropicFactor(3, 0.0), Damping()) == (math.inf, 1.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"value": 0.0}, "damping must be positive"),
        ({"mode": "both"}, "damping_mode"),
        ({"gamma": -1.0, "mode": "absolute"}, "gamma"),
        ({"gamma": 0.1}, "gamma=0.1 is read only"),
        ({"exponent": 0.6}, "exponent"),
        ({"rank_tolerance": 1.0}, "rank_tolerance"),
    ],
)
def test_bad_values_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Damping(**fields)


@pytest.mark.parametrize(
    ("mass", "rank"), [(0.0, 20), (0.5, 1), (0.3, 2), (0.26, 2), (0.24, 3), (0.1, 4)]
)
def test_the_rank_follows_the_mass_that_may_be_left_out(mass, rank):
    """Eigenvalues 1, 1/2, 1/4 … hold 2 in all: after k of them a share of 2⁻ᵏ is left."""
    values = 0.5 ** torch.arange(20, dtype=F64)
    damping = Damping(value=0.1, rank_tolerance=0.0, tail_mass=mass)
    side = damp_side(Eigen(torch.eye(20, dtype=F64), values), damping, F64, widest_dense=10)
    assert isinstance(side, LowRank) and side.vectors.shape[1] == rank
    if rank < 20:
        assert side.tail == pytest.approx(
            (float(values[rank:].mean()) + 0.1 * float(values.mean())) ** -0.5
        )
    with pytest.raises(ValueError, match="tail_mass must lie in"):
        Damping(tail_mass=1.0)
