"""Factors averaged over refreshes, and refreshes that find nothing has moved: against explicit
matrices.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from dpkfc.curvature import KFAC, FeatureNoise
from dpkfc.curvature.eigen import Eigen
from dpkfc.curvature.factor_history import measure_distance, measure_drift
from dpkfc.curvature.factor_sums import FactorAccumulator
from tests.curvature.toys import capture, dense_matrix, make_kfac, mlp

SETTINGS = [{}, {"shape": "diagonal"}, {"shape": "isotropic"}]


def rows(n, d=6, seed=0):
    return torch.randn(
        n, d, generator=torch.Generator().manual_seed(100 * seed + n), dtype=torch.float64
    )


def matrix_of(sums):
    found = sums.result()
    return (
        dense_matrix(found)
        if isinstance(found, Eigen)
        else torch.diag(found.values.double().expand(found.dim))
    )


def sums_of(n, settings, seed=0):
    made = FactorAccumulator(6, **settings)
    made.add(rows(n, seed=seed), n)
    return made


_kfac = partial(make_kfac, probe_size=24)


# -- sums


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("counts", [(2, 3), (2, 9), (9, 2), (8, 9, 3), (2, 2, 2, 2)])
def test_an_average_is_that_of_its_weights(counts, settings):
    share, running = 0.7, None
    for seed, n in enumerate(counts):
        new = sums_of(n, settings, seed)
        if running is not None:
            past, new = running.decay(share), new
            past.merge(new)
            new = past
        running = new
    weights = [share ** (len(counts) - 1 - i) for i in range(len(counts))]
    total = sum(
        w * rows(n, seed=i).T @ rows(n, seed=i)
        for i, (w, n) in enumerate(zip(weights, counts, strict=True))
    )
    mean = total / sum(w * n for w, n in zip(weights, counts, strict=True))
    if settings:
        mean = torch.diag(
            mean.diagonal() if settings["shape"] == "diagonal" else mean.diagonal().mean().expand(6)
        )
    assert_close(matrix_of(running), mean, rtol=1e-12, atol=1e-12)


def test_nothing_is_averaged_of_a_side_too_wide_for_a_matrix():
    past, new = sums_of(3, {"max_size": 4}), sums_of(2, {"max_size": 4}, 1)
    later = past.decay(0.9)
    later.merge(new)
    assert_close(matrix_of(later), matrix_of(new))
    # it became a diagonal, which costs nothing to keep
    folded = sums_of(9, {"max_size": 4}).decay(0.5)
    folded.merge(sums_of(9, {"max_size": 4}, 1))
    want = (0.5 * rows(9).square().sum(0) + rows(9, seed=1).square().sum(0)) / 13.5
    assert_close(matrix_of(folded), torch.diag(want))


@pytest.mark.parametrize("first", SETTINGS)
@pytest.mark.parametrize("second", SETTINGS)
@pytest.mark.parametrize("counts", [(2, 3), (2, 9), (9, 2), (9, 8)])
def test_distances_are_those_of_matrices(counts, first, second):
    one, other = sums_of(counts[0], first), sums_of(counts[1], second, 1)
    a, b = (x / x.trace() for x in map(matrix_of, (one, other)))
    expected = torch.linalg.matrix_norm(a - b) / torch.linalg.matrix_norm(a)
    assert measure_distance(one, other) == pytest.approx(float(expected), rel=1e-6, abs=1e-7)
    assert measure_distance(one, one) == pytest.approx(0, abs=1e-7)


def test_distances_count_a_trace_without_rows():
    """What is left out of the first pairs is spread evenly over all directions."""
    one, other = (replace(sums_of(n, {}, n), rest=rest) for n, rest in ((2, 1.5), (3, 4.0)))
    a, b = (sums_of(n, {}, n) for n in (2, 3))
    a, b = (matrix_of(x) * x.count + torch.eye(6) * rest / 6 for x, rest in ((a, 1.5), (b, 4.0)))
    a, b = a / a.trace(), b / b.trace()
    expected = torch.linalg.matrix_norm(a - b) / torch.linalg.matrix_norm(a)
    assert measure_distance(one, other) == pytest.approx(float(expected), rel=1e-6)


def test_distances_of_empty_sides():
    empty = FactorAccumulator(6)
    empty.add(torch.zeros(9, 6), 9)
    assert measure_distance(empty, empty) == 0.0
    assert measure_distance(empty, sums_of(9, {})) == 1.0


def test_of_a_wide_side_the_first_pairs_are_kept_and_the_trace():
    """Beside the exact average: the pairs of the past exactly, the rest by its trace."""
    d, keep, share = 60, 12, 0.8
    scales = torch.arange(1, d + 1, dtype=torch.float64).pow(-1.0)
    old, new = rows(300, d) * scales, rows(20, d, 1) * scales
    past = FactorAccumulator(d, decays=True)
    past.add(old, 300)
    factor = past.result(keep)
    assert factor.values.numel() == keep and factor.trace == pytest.approx(
        float(old.square().sum()) / 300
    )
    kept = past.remember(factor)
    assert kept.total is None and kept.row_count == keep
    assert_close(matrix_of(kept), dense_matrix(factor), rtol=1e-9, atol=1e-12)
    later = kept.decay(share)
    one = FactorAccumulator(d, decays=True)
    one.add(new, 20)
    later.merge(one)
    expected = (share * 300 * dense_matrix(replace(factor, rest=0.0)) + new.T @ new) / (
        share * 300 + 20
    )
    rest = share * 300 * factor.rest / (share * 300 + 20)
    found, exact = later.result(keep), torch.linalg.eigvalsh(expected).flip(0)
    # Two rounds from the pairs of the past follow the new ones.
    assert_close(found.values[:6], exact[:6], rtol=1e-2, atol=0)
    assert found.trace == pytest.approx(float(expected.trace()) + rest, rel=1e-12)
    assert later.result(None).values[0] == pytest.approx(float(exact[0]), rel=1e-6)


# -- refreshes


def dense_factors(kfac, model, step):
    return {
        name: {side: dense_matrix(x) for side, x in factors.sides.items()}
        for name, factors in kfac.factors(model, capture, step).items()
    }


def assert_spectra_are_of_means(built, weights, refreshes):
    """Compare eigenvalues with the eigenvalues of the weighted mean of the refreshes' factors."""
    for name, sides in built.spectra.items():
        for side, role in (("A", "input"), ("G", "output")):
            parts = zip(weights, refreshes, strict=True)
            mean = sum(w * dense[name][role] for w, dense in parts) / sum(weights)
            expected = torch.linalg.eigvalsh(mean).flip(0)[: sides[side].numel()]
            assert_close(sides[side], expected.clamp(min=0), rtol=1e-8, atol=1e-12)


def test_a_refresh_averages_with_the_ones_before():
    model = mlp().double()
    kfac = _kfac(decay=0.6, later_probe_size=24, max_rank=None, scale="raw")
    plain = _kfac(max_rank=None, scale="raw")
    built, dense = None, []
    for step in (0, 50, 100):
        built = kfac.build(model, capture, step, previous=built)
        dense.append(dense_factors(plain, model, step))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
    assert_spectra_are_of_means(built, [0.36, 0.6, 1.0], dense)


def test_later_refreshes_may_look_at_fewer_examples():
    """The mean of 8 examples with weight 0.75 each and the 2 examples of a later probe."""
    model = mlp().double()
    whole, few = (_kfac(probe_size=n, max_rank=None, scale="raw") for n in (8, 2))
    dense = [dense_factors(whole, model, 0), dense_factors(few, model, 50)]
    kfac = replace(whole, decay=0.75, later_probe_size=2)
    first = kfac.build(model, capture, 0)
    assert first.digest == replace(kfac, later_probe_size=None).build(model, capture, 0).digest
    built = kfac.build(model, capture, 50, previous=first)
    assert_spectra_are_of_means(built, [6, 2], dense)


def test_by_default_later_refreshes_take_a_sixteenth_of_the_probe():
    kfac = KFAC(probe=FeatureNoise(12))
    sizes = [kfac.probe_spec(50, later=later).size for later in (False, True)]
    assert sizes == [256, 16] and kfac.describe()["later_probe_size"] == 16
    whole = replace(kfac, decay=0.0)
    assert whole.probe_spec(50, later=True).size == 256 and not whole.uses_previous_state
    assert "later_probe_size" not in whole.describe()
    assert KFAC(probe=FeatureNoise(12), probe_size=3).fewest_probe_examples == 1


def test_what_has_not_moved_is_kept():
    model, kfac = mlp(), _kfac(decay=0.0, drift=0.9)
    first = kfac.build(model, capture, 0)
    assert first.drift is None
    second = kfac.build(model, capture, 50, previous=first)
    assert second.metric is first.metric and second.step == 50 and 0 < second.drift < 0.9
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).sign()
                * parameter.abs()
                * 9
            )
    fussy = _kfac(decay=0.0, drift=1e-3).build(model, capture, 100, previous=second)
    assert fussy.metric is not first.metric and fussy.drift > 1e-3


def test_a_layer_without_a_past_has_moved():
    model = mlp()
    built = _kfac(decay=0.5).build(model, capture, 0)
    layers = {name: SimpleNamespace(sides=sides) for name, sides in built.running[0].items()}
    assert measure_drift(layers, built.running[0]) == 0.0
    assert measure_drift(
        layers | {"new": SimpleNamespace(sides={"input": None})}, built.running[0]
    ) == float("inf")


@pytest.mark.parametrize(
    ("field", "value"), [("decay", 1.0), ("decay", -0.1), ("drift", -1.0), ("drift", float("inf"))]
)
def test_bad_values_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        _kfac(**{field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"later_probe_size": 4, "decay": 0.0},
        {"later_probe_size": 64, "decay": 0.5},
        {"later_probe_size": 0},
    ],
)
def test_fewer_examples_later_need_an_average_and_are_fewer(fields):
    with pytest.raises(ValueError, match="later_probe_size"):
        _kfac(probe_size=32, **fields)
