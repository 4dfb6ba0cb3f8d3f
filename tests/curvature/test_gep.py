"""The public subspace against dense matrices, its description, its checkpoint and its refusals."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpkfc.curvature.base import PreconditionerState
from dpkfc.curvature.gep import GEP, _Group
from dpkfc.curvature.noise_probes import FeatureNoise
from dpkfc.curvature.probe_pass import public_generator
from dpkfc.curvature.probes import PublicData
from dpkfc.linalg.blocks import MaterializedGradients
from tests.curvature.toys import CNN_SHAPE, Text, capture, cnn, mlp, rules_of
from tests.models import randn


def public(*shape, n=30):
    generator = torch.Generator().manual_seed(5)
    return PublicData(
        torch.randn(n, *shape, generator=generator),
        torch.arange(n) % 3,
        provenance="drawn at random",
    )


def gep(probe=None, **settings):
    return GEP(
        **{
            "probe": probe or public(12),
            "rank": 6,
            "groups": 1,
            "labels": "given",
            "chunk": 7,
            **settings,
        }
    )


def build(model, config, step=0):
    return config.build(model, capture, step, rules_of(model))


def dense(basis):
    """L `[p, K]` with the layers in order, roles sorted within a layer."""
    columns = []
    for one in torch.eye(basis.metric.width, dtype=torch.float64):
        parts = [span.combine(one) for span in basis.metric.spans.values()]
        tensors = [
            x for part in parts for x in (part.values() if isinstance(part, dict) else [part])
        ]
        columns.append(torch.cat([x.flatten() for x in tensors]))
    return torch.stack(columns, 1)


def public_gradients(model, probe):
    """Per-example gradients `[m, p]` by plain autograd: weight and bias of a linear layer as one
    matrix.
    """
    rows = []
    for x, y in zip(probe.inputs.double(), probe.labels, strict=True):
        grads = torch.autograd.grad(
            F.cross_entropy(model(x[None]), y[None]), list(model.parameters())
        )
        pairs = zip(grads[::2], grads[1::2], strict=True)
        rows.append(torch.cat([torch.cat([w, b[:, None]], 1).flatten() for w, b in pairs]))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "model", [mlp(), cnn(), cnn(2), Text()], ids=["mlp", "cnn", "grouped", "text"]
)
@pytest.mark.parametrize("groups", [1, 2, 9])
def test_columns_are_orthonormal_within_groups(model, groups):
    model, probe = model.double(), public(12)
    if isinstance(model, Text):
        probe = PublicData(torch.randint(0, 11, (30, 7)), provenance="random text")
    elif any(isinstance(m, nn.Conv2d) for m in model):
        probe = public(*CNN_SHAPE)
    basis = build(model, gep(probe, groups=groups, labels="uniform", rank=7))
    matrix = dense(basis)
    torch.testing.assert_close(
        matrix.T @ matrix, torch.eye(7, dtype=torch.float64), rtol=0, atol=1e-12
    )
    assert basis.metric.defect < 1e-12
    for span in basis.metric.spans.values():
        assert span.length == pytest.approx(
            math.sqrt(sum(float(v.square().sum()) for v in span.vectors.values()))
        )


@pytest.mark.parametrize("iterations", [1, 3])
def test_it_is_the_power_iteration_on_public_gradients(iterations):
    model = mlp().double()
    config = gep(power_iterations=iterations, probe_size=30)
    order = torch.randperm(30, generator=public_generator(0, 4))
    probe = PublicData(
        config.probe.inputs[order], config.probe.labels[order], provenance="in the order drawn"
    )
    g = public_gradients(model, probe)
    expected = torch.randn(6, g.shape[1], generator=public_generator(0, 4, "subspace")).double().T
    for _ in range(iterations):
        expected = torch.linalg.qr(g.T @ (g @ expected))[0]
    found = dense(build(model, config, step=4))
    torch.testing.assert_close(found @ found.T, expected @ expected.T, rtol=1e-7, atol=1e-8)


def test_directions_are_shared_out_by_the_roots_of_the_sizes():
    basis = build(mlp(12, 8, 4).double(), gep(groups=2))
    ranks = [row["rank"] for row in basis.report]
    assert ranks == [4, 2]  # √104 : √36 of six
    assert [row["dim"] for row in basis.report] == [104, 36]
    assert basis.metric.width == 6


def test_float32_bases_say_how_far_from_orthonormal_they_are():
    basis = build(mlp(), gep())
    matrix = dense(basis).double()
    error = torch.linalg.matrix_norm(matrix.T @ matrix - torch.eye(6), 2)
    assert 0 < float(error) <= basis.metric.defect < 1e-5
    # Of several groups it is the largest.
    basis = build(mlp(), gep(groups=2))
    matrix = dense(basis).double()
    error = matrix.T @ matrix - torch.eye(6)
    norms = [error[s.columns, s.columns].norm() for s in basis.metric.spans.values()]
    assert norms[0] != norms[1] and basis.metric.defect == pytest.approx(float(max(norms)))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_directions_do_not_depend_on_the_size_of_gradients(size):
    group = _Group({"a": {"": (3, 4)}}, 2)
    image = randn(2, 12).float()
    torch.testing.assert_close(group.orthonormalize(image * size), group.orthonormalize(image))


def test_layers_without_a_public_gradient_still_get_orthonormal_directions():
    model = mlp().double()
    with torch.no_grad():
        model[2].weight.zero_()  # nothing reaches the first layer
    matrix = dense(build(model, gep(groups=2)))
    torch.testing.assert_close(
        matrix.T @ matrix, torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_a_layer_that_some_examples_do_not_reach_has_no_gradient_there():
    """Lᵀ Ĝᵀ Ĝ over both micro-batches, with zeros for the layer that the second lacks."""
    first, second, alone = randn(3, 2, 4), randn(3, 3, 1), randn(2, 2, 4)
    group = _Group({"a": {"": (2, 4)}, "b": {"": (3, 1)}}, 2)
    basis, image = randn(2, 11), torch.zeros(2, 11, dtype=torch.float64)
    group.add_image(
        {"a": MaterializedGradients(first), "b": MaterializedGradients(second)}, basis, image
    )
    group.add_image({"a": MaterializedGradients(alone)}, basis, image)
    both = torch.cat([first.flatten(1), second.flatten(1)], 1)
    padded = torch.cat([alone.flatten(1), torch.zeros(2, 3)], 1)
    g = torch.cat([both, padded])
    torch.testing.assert_close(image, basis @ g.T @ g, rtol=1e-12, atol=1e-12)


# -- what does not work ----------------------------------------------------------------------------


class Branch(nn.Module):
    """A layer that is not called unless asked for."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x):
        return self.used(x)


def test_an_unreached_layer_is_residual_alone_and_refused_without_one():
    model = Branch().double()
    seen = {"used": "linear", "unused": "linear"}
    basis = gep().build(model, _used_only, 0, seen)
    assert list(basis.metric.spans) == ["used"]
    with pytest.raises(ValueError, match="layer 'unused' is not reached by the probe"):
        gep(residual_norm=None).build(model, _used_only, 0, seen)


def _used_only(model, loss):
    return capture(nn.ModuleDict({"used": model.used}), lambda _: loss(model))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"probe": "images"}, "probe must derive from"),
        ({"rank": 0}, "rank must be an integer >= 1"),
        ({"rank": 31}, "cannot be found from the gradients of 30 public examples"),
        ({"probe_size": 5}, "raise probe_size"),
        ({"embedding_norm": 0.0}, "embedding_norm must be positive"),
        ({"residual_norm": float("inf")}, "residual_norm must be positive"),
        ({"share": 1.0}, r"share must lie in \(0, 1\)"),
        ({"labels": "true"}, "labels must be one of"),
        ({"every": 0}, "every must be an integer"),
        ({"groups": True}, "groups must be an integer"),
        ({"seed": 0.5}, "seed must be an integer"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        gep(**settings)


def test_as_many_directions_as_public_examples_are_allowed():
    assert gep(rank=30).rank == 30


def test_as_many_directions_as_parameters_are_refused_by_name():
    with pytest.raises(ValueError, match=r"layers '2' 8 directions of 8 parameters"):
        build(
            nn.Sequential(nn.Linear(12, 3), nn.Tanh(), nn.Linear(3, 2)),
            gep(rank=25, groups=2, labels="uniform"),
        )


def test_public_gradients_that_overflow_are_refused():
    probe = PublicData(torch.full((30, 12), 1e30), provenance="far too large")
    with pytest.raises(ValueError, match="overflow when squared"):
        build(nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 4)), gep(probe, labels="uniform"))


# -- description and state -------------------------------------------------------------------------


def test_the_description_is_plain_and_tells_settings_apart():
    described = [
        json.dumps(c.describe())
        for c in (gep(), gep(residual_norm=None), gep(share=0.3), gep(FeatureNoise(12)))
    ]
    assert len(set(described)) == 4
    assert json.loads(described[0])["name"] == "gep" and json.loads(described[1])["name"] == "b-gep"
    assert json.loads(described[0])["uses_private_data"] is False
    assert json.loads(described[3])["probe_size"] == 256


@pytest.mark.parametrize("residual_norm", [2.0, None])
def test_its_state_restores_every_bit(residual_norm):
    model = Text().double()
    probe = PublicData(torch.randint(0, 11, (30, 7)), provenance="random text")
    basis = build(
        model,
        gep(probe, groups=2, labels="uniform", residual_norm=residual_norm, share=0.3),
        step=8,
    )
    again = PreconditionerState.from_state_dict(basis.state_dict())
    assert again.digest == basis.digest and again.step == 8
    assert torch.equal(dense(again), dense(basis))
    assert (
        again.metric.clipping == basis.metric.clipping
        and again.metric.residual_scale == basis.metric.residual_scale
    )
