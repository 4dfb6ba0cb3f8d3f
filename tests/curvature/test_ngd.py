"""DP-NGD: vector 8.8 of the specification against dense matrices, the schedule, and every kind of
layer.
"""

import pytest
import torch
from torch.testing import assert_close

from dpkfc.curvature import NGD, FeatureNoise, PinkNoise, PublicData
from dpkfc.curvature.model_state import preserve_model
from dpkfc.curvature.ngd import PostNoiseWhitening
from dpkfc.curvature.probe_pass import ProbeSpec, run_probe
from dpkfc.linalg.metric import Elementwise
from tests.curvature.toys import (
    CNN_SHAPE,
    Text,
    capture,
    cnn,
    mlp,
    raise_to,
    rules_of,
)
from tests.models import randn

F64 = torch.float64


def ngd(**settings):
    return NGD(
        **{
            "probe": FeatureNoise(12),
            "lambda_safe": 0.0025,
            "steps": 1000,
            "probe_size": 40,
            **settings,
        }
    )


def test_the_schedule_has_the_values_of_the_specification():
    config = ngd(lambda_base=1e-4)
    expected = {
        0: 0.0025,
        50: 0.0013,
        100: 1e-4,
        500: 1.0072e-4,
        700: 1.4162e-4,
        900: 8.3907e-4,
        950: 1.45511e-3,
    }
    for step, value in {**expected, 1000: 0.0025, 5000: 0.0025}.items():
        assert config.floor(step) == pytest.approx(value, rel=1e-4)
    within = max(t for t in range(1000) if config.floor(t) <= 2e-4)
    assert within == pytest.approx(755, abs=5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lambda_safe": 0.0}, "lambda_safe must be positive"),
        ({"lambda_base": 1.0}, "lambda_base must lie in"),
        ({"warm": 1.0}, "warm must lie in"),
        ({"power": 0.0}, "power must be positive"),
        ({"every": 0}, "every must be an integer"),
        ({"order": "sideways"}, "order must be one of"),
        ({"probe": 3}, "probe must derive from"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ngd(**settings)


# -- vector 8.8 ------------------------------------------------------------------------------------


def dense_fisher(of, spectrum):
    """G ⊗ A on the row-major vec of `[d_out, d_in]`, from the bases and eigenvalues that are
    held.
    """
    sides = []
    for q, side in ((of.output, "G"), (of.input, "A")):
        values = spectrum[side].to(F64)
        sides.append(torch.diag(values) if q is None else (q * values) @ q.T)
    return torch.kron(sides[0].contiguous(), sides[1].contiguous())


def run_on_probe(config, model, step=0):
    run = config.probe_spec(step)
    whole = ProbeSpec(
        **{**{f: getattr(run, f) for f in run.__dataclass_fields__}, "chunk": run.size}
    )
    with preserve_model(model):
        return dict(next(iter(run_probe(model, capture, whole))).blocks)


def test_positions_count_in_a_and_not_in_g():
    """Resolution 7: A = 1/n ΣΣ aaᵀ, G = 1/(nT) ΣΣ bbᵀ."""
    torch.manual_seed(0)
    model = cnn(groups=2).double()
    config = ngd(probe=PinkNoise(CNN_SHAPE))
    built = config.build(model, capture, 0, rules_of(model))
    for name, block in run_on_probe(config, model).items():
        a, b = block.a.flatten(0, 1), block.b.flatten(0, 1)
        exact = torch.kron(b.T @ b / len(b), a.T @ a / block.a.shape[0])
        fisher = dense_fisher(built.metric[name], built.spectra[name])
        assert_close(fisher, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("step", [0, 3, 500])
def test_map_and_variance_equal_dense_matrices(step):
    """Vector 8.8: g F̃^(−1/2) and diag(F̃⁻¹), to 1e-10.

    `test_in_a_session.py` has the clip, the noise and the update.
    """
    torch.manual_seed(1)
    model, config = (
        mlp(d_in=6, width=5, classes=3).double(),
        ngd(probe=FeatureNoise(6), lambda_base=1e-4),
    )
    built = config.build(model, capture, 0)
    metric, floor = config.metric_at(built, step), config.floor(step)
    for name, block in run_on_probe(config, model).items():
        fisher = dense_fisher(built.metric[name], built.spectra[name])
        half, whole = raise_to(fisher, -0.5, floor), raise_to(fisher, -1.0, floor)
        g = block.per_example().flatten(1)
        shape = (-1, *metric[name].scale.shape)
        z = metric[name].apply(g.view(shape)).flatten(1)
        assert_close(z, g @ half, rtol=1e-10, atol=1e-10)
        assert_close(metric[name].variance().flatten(), whole.diagonal(), rtol=1e-10, atol=1e-10)


def test_orders_differ_in_where_the_map_stands():
    torch.manual_seed(3)
    model, g = mlp().double(), randn(8, 13)
    maps = {}
    for order in ("split", "after", "before"):
        config = ngd(order=order)
        maps[order] = config.metric_at(config.build(model, capture, 0), 7)["0"]
    natural = maps["split"].apply(maps["split"].apply(g))
    assert_close(maps["after"].apply(g), natural, rtol=1e-10, atol=1e-10)
    assert isinstance(maps["before"], PostNoiseWhitening) and maps["before"].is_identity
    assert_close(maps["before"].inverse().apply(g), natural, rtol=1e-10, atol=1e-10)


# -- other layers ----------------------------------------------------------------------------------


def test_other_parameters_have_a_diagonal_under_the_same_floor():
    """Resolution 9: embeddings and norm layers, E g² per entry, unread rows at the floor."""
    torch.manual_seed(0)
    model = Text(rows=30).double()
    ids = PublicData(torch.randint(11, (20, 5)), provenance="random ids")
    config = ngd(probe=ids, probe_size=None)
    built = config.build(model, capture, 0, rules_of(model))
    assert config.describe()["probe_size"] == 20
    blocks, floor = run_on_probe(config, model), config.floor(0)
    table = blocks["embedding"].per_example().square().mean(0)
    assert_close(
        built.metric["embedding"].scale, table.clamp(min=floor).rsqrt().T, rtol=1e-10, atol=0
    )
    assert float(built.metric["embedding"].scale[:, 11:].min()) == pytest.approx(floor**-0.5)
    norm = built.metric["norm"]
    assert isinstance(norm, Elementwise)
    for role, g in blocks["norm"].grads.items():
        exact = g.square().mean(0).clamp(min=floor).rsqrt()
        assert_close(norm.scale[role], exact, rtol=1e-10, atol=0)


def test_sides_that_are_too_wide_keep_their_diagonal():
    torch.manual_seed(0)
    model = mlp().double()
    config = ngd(max_factor_size=10, probe_size=64)
    built = config.build(model, capture, 0)
    entry = built.metric["0"]
    assert entry.input is None and entry.output is not None
    block = run_on_probe(config, model)["0"]
    assert_close(built.spectra["0"]["A"], block.a[:, 0].square().mean(0), rtol=1e-6, atol=0)
    assert any("diagonal" in row["note"] for row in built.report)


def test_few_examples_leave_a_complete_basis():
    torch.manual_seed(0)
    model = mlp().double()
    built = ngd(probe_size=4).build(model, capture, 0)
    for name in ("0", "2"):
        for q in (built.metric[name].input, built.metric[name].output):
            assert_close(q.T @ q, torch.eye(len(q), dtype=F64), rtol=0, atol=1e-12)
    assert int((built.spectra["0"]["A"] > 0).sum()) == 4


def test_a_layer_that_the_probe_does_not_reach_is_refused_by_name():
    model = mlp()
    with pytest.raises(ValueError, match="does not reach these layers: aside"):
        ngd().build(model, capture, 0, {**rules_of(model), "aside": "linear"})
