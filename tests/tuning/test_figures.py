"""Figures of the papers: similarity, realised maps, the artefact of added identities, mean-field
theory, maps over settings.
"""

import math

import pytest
import torch
from torch import nn

from dpkfc.curvature import KFAC, FeatureNoise, Probe
from dpkfc.curvature.changed_factors import randomize_directions
from dpkfc.curvature.eigen import eigen_of_rows, eigh
from dpkfc.curvature.factors import DiagonalFactor, IsotropicFactor
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layer_contributions import capture
from dpkfc_papers.mean_field import ACTIVATIONS, Network, measure_network, predict_variances
from dpkfc_papers.sensitivity import importance
from dpkfc_papers.similarity import (
    AUTHORS,
    UNDAMPED,
    _products,
    inner_product,
    realised,
    track_factors,
)
from tests.curvature.toys import dense_matrix


def covariance(dim, seed, rows=64):
    x = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.T @ (x * torch.logspace(0, -2, rows, dtype=torch.float64)[:, None]) / rows


def layer_factors(seed, std=1.0, probe_size=64):
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 10)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(1))
    layers = find_layers(model)
    probe = FeatureNoise(12, std=std)
    kfac = KFAC(
        probe=Doubled(probe),
        sides="both",
        probe_size=probe_size,
        max_rank=None,
        rows_per_dim=None,
        seed=seed,
    )
    return kfac.factors(model, lambda m, loss: capture(m, layers, loss))


class Doubled(Probe):
    """Another probe in float64."""

    def __init__(self, probe):
        self.probe = probe

    def sample(self, n, generator):
        inputs, labels = self.probe.sample(n, generator)
        return inputs.double(), labels

    def describe(self):
        return self.probe.describe()


def test_equal_undamped_factors_are_alike_in_all_that_is_measured():
    for name, factors in layer_factors(0).items():
        for side, one in track_factors(factors, factors, UNDAMPED, 64).items():
            assert (
                one.cosine == pytest.approx(1, abs=1e-9)
                and one.error < 1e-5
                and one.scale == pytest.approx(1)
            ), (name, side)


def test_numbers_are_those_of_dense_matrices_and_of_their_kronecker_product():
    first, second = layer_factors(0)["0"], layer_factors(5, std=2.0)["0"]
    a, b = ({s: dense_matrix(f.sides[s]) for s in ("input", "output")} for f in (first, second))
    found = track_factors(first, second, UNDAMPED, 64)
    pairs = {"A": (a["input"], b["input"]), "G": (a["output"], b["output"])}
    pairs["F"] = (torch.kron(a["input"], a["output"]), torch.kron(b["input"], b["output"]))
    for side, (x, y) in pairs.items():
        assert found[side].cosine == pytest.approx(
            float((x * y).sum() / x.norm() / y.norm()), rel=1e-6
        )
        assert found[side].error == pytest.approx(float((x - y).norm() / x.norm()), rel=1e-6)
        assert found[side].scale == pytest.approx(float(y.trace() / x.trace()), rel=1e-6)


def test_the_added_identity_makes_random_directions_look_alike():
    factors = layer_factors(0, probe_size=256)
    control = randomize_directions(factors, 3)
    for name, of in factors.items():
        plain = track_factors(of, control[name], UNDAMPED, 256)["G"]
        shifted = track_factors(of, control[name], AUTHORS, 256)["G"]
        assert plain.cosine < 0.97 and plain.error > 0.2, name
        assert shifted.cosine > 0.995 and shifted.error < 0.1, name


def test_the_authors_sums_are_those_of_a_mean_loss_and_an_added_identity():
    first, second = layer_factors(0)["2"], layer_factors(5)["2"]
    x, y = (
        dense_matrix(f.sides["output"]) / 64**2 + 1e-5 * torch.eye(10, dtype=torch.float64)
        for f in (first, second)
    )
    found = track_factors(first, second, AUTHORS, 64)["G"]
    assert found.cosine == pytest.approx(float((x * y).sum() / x.norm() / y.norm()), rel=1e-9)
    assert found.error == pytest.approx(float((x - y).norm() / x.norm()), rel=1e-5)


@pytest.mark.parametrize("exponent", [0.25, 0.5])
@pytest.mark.parametrize("kind", ["dense", "diagonal", "isotropic", "low rank"])
def test_a_realised_map_has_the_eigenvalues_of_the_dense_product(kind, exponent):
    reference = eigh(covariance(20, 0))
    matrix = covariance(20, 1, rows=8 if kind == "low rank" else 64)
    other = {
        "dense": lambda: eigh(matrix),
        "low rank": lambda: eigh(matrix),
        "diagonal": lambda: DiagonalFactor(matrix.diagonal()),
        "isotropic": lambda: IsotropicFactor(20, 0.3),
    }[kind]()
    dense = {
        "diagonal": matrix.diagonal().diag(),
        "isotropic": 0.3 * torch.eye(20, dtype=torch.float64),
    }.get(kind, matrix)
    shifted = torch.linalg.eigh(
        dense + 0.1 * dense.trace() / 20 * torch.eye(20, dtype=torch.float64)
    )
    root = shifted[1] @ shifted[0].pow(-exponent).diag() @ shifted[1].T
    expected = torch.linalg.eigvalsh(root @ covariance(20, 0) @ root)
    found = realised(reference, other, damping=0.1, exponent=exponent)
    assert found.largest == pytest.approx(float(expected[-1]), rel=1e-8)
    assert found.smallest == pytest.approx(float(expected[0]), rel=1e-6)
    assert found.flatness == pytest.approx(
        float(expected.sum() / math.sqrt(20) / expected.norm()), rel=1e-8
    )


def test_a_singular_curvature_has_no_condition_number_but_one_on_what_it_holds():
    singular = eigh(covariance(20, 0, rows=8))
    found = realised(singular, None)
    assert found.smallest < 1e-12 and math.isinf(found.condition) and 1 < found.held < 1e6
    assert _products(singular, singular, 0.0, 1.0).compare().cosine == pytest.approx(1)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_wide_networks_have_the_variances_and_traces_of_theory(activation):
    network = Network(
        activation=activation, width=768, depth=4, inputs=256, outputs=32, weight_variance=1.5
    )
    theory = predict_variances(network)
    many = [measure_network(network, examples=64, seed=seed) for seed in range(3)]
    for what in ("forwards", "backwards", "traces"):
        measured = torch.tensor([getattr(one, what) for one in many]).mean(0)
        assert measured.tolist() == pytest.approx(getattr(theory, what), rel=0.15), what


def test_theory_of_relu_is_known_in_closed_form():
    shape = {"width": 50, "depth": 3, "inputs": 20, "outputs": 5}
    theory = predict_variances(
        Network(activation="relu", weight_variance=2.0, bias_variance=0.0, **shape)
    )
    assert theory.forwards == pytest.approx([2.0, 2.0, 2.0], rel=1e-5)
    assert theory.backwards == pytest.approx([1 / 25 / 10, 1 / 25 / 10, 1 / 25], rel=1e-3)
    assert theory.traces == pytest.approx([50 / 250 * 21, 50 / 250 * 51, 5 / 25 * 51], rel=1e-3)


def rows_of(accuracy):
    pairs = [(lr, c) for lr in (1, 2, 4) for c in (1, 3, 9)]
    return [
        {"run": {"settings": {"lr": lr, "max_grad_norm": c}}, "accuracy": accuracy(lr, c)}
        for lr, c in pairs
    ]


def test_importance_is_of_the_setting_that_decides():
    found = importance(rows_of(lambda lr, c: 0.5 + lr / 10), ["lr", "max_grad_norm", "seed"])
    assert found["lr"] == pytest.approx(1)
    assert found["max_grad_norm"] == pytest.approx(0, abs=1e-12) and "seed" not in found


def _factor(kind, d=5):
    if kind == "isotropic":
        return IsotropicFactor(d, 1.7), 1.7 * torch.eye(d, dtype=torch.float64)
    if kind == "diagonal":
        values = torch.rand(d, dtype=torch.float64)
        return DiagonalFactor(values), torch.diag(values)
    eigen = eigen_of_rows(torch.randn(3, d, dtype=torch.float64))
    return eigen, dense_matrix(eigen)


@pytest.mark.parametrize("first", ["full", "diagonal", "isotropic"])
@pytest.mark.parametrize("second", ["full", "diagonal", "isotropic"])
def test_inner_products_of_factors_equal_those_of_matrices(first, second):
    (f, dense_f), (s, dense_s) = _factor(first), _factor(second)
    assert inner_product(f, s) == pytest.approx(float((dense_f * dense_s).sum()), rel=1e-9)
