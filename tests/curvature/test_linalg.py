import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpkfc.curvature.eigen import (
    Eigen,
    decompose_leading,
    eigen_of_covariance,
    eigen_of_rows,
    eigh,
    gram,
)
from tests.curvature.toys import dense_matrix
from tests.models import randn


def _psd(d, rank, dtype=torch.float32):
    rows = randn(rank, d)
    return (rows.T @ rows / rank).to(dtype)


def _orthonormal_error(vectors):
    overlap = vectors.double().T @ vectors.double()
    return (
        float((overlap - torch.eye(overlap.shape[0], dtype=torch.float64)).abs().max())
        if overlap.numel()
        else 0.0
    )


@given(
    d=st.integers(1, 12),
    rank=st.integers(1, 14),
    power=st.sampled_from([-42, -38, -20, 0, 18, 30, 36]),
)
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


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_an_error(bad):
    matrix = torch.eye(3)
    matrix[1, 1] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        eigh(matrix)


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

    monkeypatch.setattr(torch.linalg, "eigh", flaky)
    matrix = _psd(4, 6)
    eigen = eigh(matrix)
    assert seen == [torch.float32, torch.float64, torch.float64]
    assert torch.allclose(dense_matrix(eigen), matrix, atol=1e-5)


def test_a_decomposition_that_never_succeeds_is_an_error(monkeypatch):
    def fail(matrix):
        raise torch.linalg.LinAlgError("no")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with pytest.raises(RuntimeError, match="no eigendecomposition"):
        eigh(torch.eye(2))


@given(n=st.integers(1, 14), d=st.integers(1, 14), power=st.sampled_from([-40, -25, 0, 15, 30]))
def test_rows_give_the_covariance_of_any_scale(n, d, power):
    torch.manual_seed(n * 31 + d)
    rows = (randn(n, d) * 10.0**power).float()
    eigen = eigen_of_rows(rows).scale_by(1 / 3)
    assert eigen.values.numel() <= min(n, d) and eigen.dim == d
    assert (eigen.values >= 0).all() and (eigen.values.diff() <= 0).all()
    assert _orthonormal_error(eigen.vectors) < 1e-5
    exact = rows.double().T @ rows.double() / 3.0
    rebuilt = (eigen.vectors.double() * eigen.values) @ eigen.vectors.double().T
    assert torch.allclose(rebuilt, exact, rtol=0, atol=2e-5 * float(exact.abs().max()))


def test_zero_rows_have_no_eigenvalue():
    eigen = eigen_of_rows(torch.zeros(3, 5))
    assert eigen.values.numel() == 0 and eigen.dim == 5 and eigen.trace == 0.0 and eigen.mean == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "d"), [(5, 256), (5, 257), (300, 384), (7, 500), (0, 300)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_by_blocks_is_the_product(dtype, n, d, transposed):
    rows = torch.randn(d, n, dtype=dtype).T if transposed else torch.randn(n, d, dtype=dtype)
    found = gram(rows)
    assert torch.allclose(
        found, rows.T @ rows, rtol=1e-5, atol=1e-4 if dtype == torch.float32 else 1e-12
    )


# -- the first eigenpairs of wide matrices


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spectrum", ["decaying", "few", "flat"])
def test_the_leading_pairs_act_as_those_of_the_whole_decomposition(dtype, spectrum):
    """(C + shift)^(−1/2) with the first 16 of 400 pairs and the mean of the rest, against the exact
    pairs.
    """
    d, k = 400, 16
    basis = torch.linalg.qr(randn(d, d)).Q
    values = {
        "decaying": torch.arange(1, d + 1).double().pow(-1.0),
        "few": torch.cat([torch.arange(5.0, 1.0, -1.0), torch.zeros(d - 4)]).double(),
        "flat": torch.ones(d).double(),
    }[spectrum]
    matrix = ((basis * values) @ basis.T).to(dtype)
    found = decompose_leading((matrix + matrix.T) / 2, k)
    assert _orthonormal_error(found.vectors) < 1e-5 and found.values.numel() == k
    assert (
        found.trace == pytest.approx(float(values.sum()), rel=1e-5)
        and (found.values.diff() <= 1e-12).all()
    )
    shift = 0.1 * float(values.mean())
    exact = Eigen(basis[:, :k], values[:k], float(values[k:].sum()))
    roots = []
    for eigen in (found, exact):
        scale, tail = (eigen.values + shift).pow(-0.5), (eigen.floor + shift) ** -0.5
        v = eigen.vectors.double()
        roots.append((v * (scale - tail)) @ v.T + tail * torch.eye(d, dtype=torch.float64))
    # any sixteen directions are as good: the root is the same multiple of the identity
    if spectrum == "flat":
        assert torch.allclose(roots[0], roots[1], atol=1e-3 * float(roots[1].max()))
    assert (
        float(
            torch.linalg.matrix_norm(roots[0] - roots[1], 2) / torch.linalg.matrix_norm(roots[1], 2)
        )
        < 1e-2
    )


def test_wide_covariances_and_many_rows_keep_the_first_pairs_alone(monkeypatch):
    sizes = []
    real = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: (sizes.append(m.shape[0]), real(m))[1])
    rows = torch.randn(700, 900) * torch.arange(1, 901).pow(-0.5)
    few = eigen_of_rows(rows, keep=20)
    tall = eigen_of_rows(rows.T.contiguous(), keep=20)
    assert max(sizes) < 50 and few.values.numel() == tall.values.numel() == 20
    for eigen, x in ((few, rows), (tall, rows.T)):
        exact = torch.linalg.svdvals(x.double())[:20].square()
        assert torch.allclose(eigen.values, exact, rtol=2e-2)
        assert eigen.trace == pytest.approx(float(x.double().square().sum()), rel=1e-5)
    for keep, kept in ((15, 15), (16, 60)):  # 60 columns are not four times 16
        x = torch.randn(500, 60)
        small, exact = eigen_of_rows(x, keep), torch.linalg.svdvals(x.double()).square()
        assert small.values.numel() == kept
        assert torch.allclose(small.values, exact[:kept], rtol=1e-5)
        assert small.rest == pytest.approx(float(exact[kept:].sum()), rel=1e-5)
    zero = eigen_of_covariance(torch.zeros(400, 400), keep=10)
    assert zero.trace == 0.0 and torch.isfinite(zero.vectors).all()


@pytest.mark.parametrize("form", ["matrix", "rows", "few rows"])
def test_pairs_of_a_matrix_that_has_moved_are_followed(form):
    """From the pairs of the matrix before, the values are those of the whole decomposition to a
    part of the mean eigenvalue, which damping hides.
    """
    d, keep = 300, 16
    scales = torch.arange(1, d + 1).pow(-1.0)
    n = 120 if form == "few rows" else 1500
    old = torch.randn(n, d) * scales
    new = old + 0.1 * torch.randn(n, d) * scales
    start = eigen_of_rows(old, keep).vectors
    if form == "matrix":
        found = eigen_of_covariance(new.T @ new, keep, start)
    else:
        found = eigen_of_rows(new, keep, start)
    exact = torch.linalg.svdvals(new.double()).square()
    assert found.values.numel() == keep and _orthonormal_error(found.vectors) < 1e-5
    assert found.trace == pytest.approx(float(exact.sum()), rel=1e-5)
    assert float((found.values - exact[:keep]).abs().max()) < 0.1 * float(exact.sum()) / d
    still = eigen_of_rows(old, keep, start)
    assert torch.allclose(still.values, torch.linalg.svdvals(old.double())[:keep].square())


def test_leading_pairs_are_the_same_every_time_and_leave_the_global_stream_alone():
    matrix = _psd(400, 500)
    before = torch.random.get_rng_state()
    first, second = decompose_leading(matrix, 10), decompose_leading(matrix, 10)
    assert torch.equal(first.vectors, second.vectors) and torch.equal(
        before, torch.random.get_rng_state()
    )


def test_what_is_left_out_counts_in_trace_matrix_and_spectrum():
    eigen = Eigen(
        torch.eye(5, dtype=torch.float64)[:, :2],
        torch.tensor([3.0, 2.0], dtype=torch.float64),
        rest=1.5,
    )
    assert (eigen.trace, eigen.mean, eigen.floor, eigen.rank) == (6.5, 1.3, 0.5, 2)
    assert torch.equal(
        dense_matrix(eigen.scale_by(2.0)),
        torch.diag(torch.tensor([6.0, 4, 1, 1, 1], dtype=torch.float64)),
    )
    assert eigen.spectrum.tolist() == [3.0, 2.0, 0.5, 0.5, 0.5]
