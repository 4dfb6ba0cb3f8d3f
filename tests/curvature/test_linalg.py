from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpkfc.curvature import linalg
from dpkfc.curvature.linalg import Eigen, eigen_of_rows, eigh


def _psd(d: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rows = torch.randn(rank, d, dtype=torch.float64)
    return (rows.T @ rows / rank).to(dtype)


def _orthonormal_error(vectors: torch.Tensor) -> float:
    overlap = vectors.double().T @ vectors.double()
    return float((overlap - torch.eye(overlap.shape[0], dtype=torch.float64)).abs().max()) if overlap.numel() else 0.0


@given(d=st.integers(1, 12), rank=st.integers(1, 14), power=st.sampled_from([-42, -38, -20, 0, 18, 30, 36]))
def test_eigh_rebuilds_a_matrix_of_any_scale(d, rank, power):
    torch.manual_seed(d * 100 + rank)
    matrix = (_psd(d, rank, torch.float64) * 10.0**power).float()
    eigen = eigh(matrix)
    assert torch.isfinite(eigen.values).all() and torch.isfinite(eigen.vectors).all()
    assert eigen.values.dtype == torch.float64 and (eigen.values >= 0).all()
    assert (eigen.values.diff() <= 0).all()
    assert _orthonormal_error(eigen.vectors) < 1e-5
    rebuilt = (eigen.vectors.double() * eigen.values) @ eigen.vectors.double().T
    largest = float(matrix.abs().max().double())
    assert float((rebuilt - matrix.double()).abs().max()) <= 1e-5 * largest


@pytest.mark.parametrize("d", [1, 2, 7])
def test_a_zero_matrix_has_zero_eigenvalues_and_a_basis(d):
    eigen = eigh(torch.zeros(d, d))
    assert eigen.values.tolist() == [0.0] * d
    assert _orthonormal_error(eigen.vectors) == 0.0


def test_denormal_entries_keep_their_value():
    eigen = eigh(torch.diag(torch.tensor([1e-42, 3e-42])))
    assert eigen.values.tolist() == pytest.approx([3e-42, 1e-42], rel=2e-3)  # a denormal itself has few digits


def test_a_matrix_of_rank_one():
    v = torch.randn(9)
    eigen = eigh(torch.outer(v, v))
    assert float(eigen.values[0]) == pytest.approx(float(v.square().sum()), rel=1e-5)
    assert float(eigen.values[1]) <= 1e-6 * float(eigen.values[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_an_error(bad):
    matrix = torch.eye(3)
    matrix[1, 1] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        eigh(matrix)
    with pytest.raises(ValueError, match="NaN or infinity"):
        eigen_of_rows(torch.tensor([[1.0, bad]]), 1)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 2, 2)])
def test_a_matrix_that_is_not_square_is_an_error(shape):
    with pytest.raises(ValueError, match="square"):
        eigh(torch.zeros(shape))


def test_float64_takes_over_where_float32_fails(monkeypatch):
    real, seen = torch.linalg.eigh, []

    def flaky(matrix):
        seen.append(matrix.dtype)
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        if len(seen) == 2:
            values, vectors = real(matrix)
            return values * float("nan"), vectors
        return real(matrix)

    monkeypatch.setattr(linalg.torch.linalg, "eigh", flaky)
    matrix = _psd(4, 6)
    eigen = eigh(matrix)
    assert seen == [torch.float32, torch.float64, torch.float64]
    assert torch.allclose(eigen.dense(), matrix, atol=1e-5)


def test_a_decomposition_that_never_succeeds_is_an_error(monkeypatch):
    def never(matrix):
        raise torch.linalg.LinAlgError("no")

    monkeypatch.setattr(linalg.torch.linalg, "eigh", never)
    with pytest.raises(RuntimeError, match="no eigendecomposition"):
        eigh(torch.eye(2))


@given(n=st.integers(1, 14), d=st.integers(1, 14), power=st.sampled_from([-40, -25, 0, 15, 30]))
def test_rows_give_the_covariance_of_any_scale(n, d, power):
    torch.manual_seed(n * 31 + d)
    rows = (torch.randn(n, d, dtype=torch.float64) * 10.0**power).float()
    eigen = eigen_of_rows(rows, 3.0)
    assert eigen.values.numel() <= min(n, d) and eigen.dim == d
    assert (eigen.values >= 0).all() and (eigen.values.diff() <= 0).all()
    assert _orthonormal_error(eigen.vectors) < 1e-5
    exact = rows.double().T @ rows.double() / 3.0
    rebuilt = (eigen.vectors.double() * eigen.values) @ eigen.vectors.double().T
    assert torch.allclose(rebuilt, exact, rtol=0, atol=2e-5 * float(exact.abs().max()))


def test_repeated_rows_do_not_add_rank():
    base = torch.randn(3, 40)
    eigen = eigen_of_rows(base.repeat(5, 1), 15)
    assert eigen.values.numel() == 3
    assert _orthonormal_error(eigen.vectors) < 1e-5


def test_nearly_parallel_rows_stay_orthonormal():
    direction = torch.randn(60)
    rows = direction + 1e-4 * torch.randn(20, 60)
    assert _orthonormal_error(eigen_of_rows(rows, 20).vectors) < 1e-5


def test_few_long_rows_never_make_a_square_matrix(monkeypatch):
    sizes = []
    real = torch.linalg.eigh
    monkeypatch.setattr(linalg.torch.linalg, "eigh", lambda m: (sizes.append(m.shape[0]), real(m))[1])
    eigen = eigen_of_rows(torch.randn(5, 200_000), 5)
    assert sizes == [5] and eigen.vectors.shape == (200_000, 5)


def test_zero_rows_have_no_eigenvalue():
    eigen = eigen_of_rows(torch.zeros(3, 5), 3)
    assert eigen.values.numel() == 0 and eigen.dim == 5 and eigen.trace == 0.0 and eigen.mean == 0.0


def test_eigen_counts_and_scales():
    eigen = Eigen(torch.eye(4)[:, :2], torch.tensor([3.0, 1.0], dtype=torch.float64))
    assert (eigen.dim, eigen.rank, eigen.trace, eigen.mean) == (4, 2, 4.0, 1.0)
    assert torch.equal(eigen.scaled(2.0).dense(), torch.diag(torch.tensor([6.0, 2.0, 0.0, 0.0])))


@pytest.mark.parametrize("divisor", [0, -1, float("nan")])
def test_a_divisor_that_is_not_positive_is_an_error(divisor):
    with pytest.raises(ValueError, match="must be positive"):
        eigen_of_rows(torch.ones(2, 2), divisor)
