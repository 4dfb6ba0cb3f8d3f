import pytest
import torch
from torch import nn

from dpkfc.curvature import (
    FeatureNoise,
    PinkNoise,
)
from dpkfc.curvature.metric_scale import probe_norms
from dpkfc.curvature.model_state import preserve_model
from dpkfc.curvature.probe_pass import public_generator, run_probe
from dpkfc.linalg.blocks import Outer
from dpkfc.linalg.sides import Dense, Identity
from tests.curvature.toys import (
    CNN_SHAPE,
    Text,
    capture,
    cnn,
    make_kfac,
    mlp,
    raise_to,
    rules_of,
    token_ids,
)
from tests.gradients.cases import UnreadTable
from tests.models import randn


def _norms(kfac, model, metric):
    with preserve_model(model):
        return torch.cat(
            [
                probe_norms(b.blocks, metric)[0]
                for b in run_probe(model, capture, kfac.probe_spec(0))
            ]
        )


# -- the metric


def test_the_metric_is_the_product_of_damped_roots():
    torch.manual_seed(1)
    model = mlp().double()
    kfac = make_kfac(scale="raw", rank_tolerance=0.0, damping=0.2)
    built = kfac.build(model, capture, 0)
    with preserve_model(model):
        blocks = [piece.blocks for piece in run_probe(model, capture, kfac.probe_spec(0))]
    for name in ("0", "2"):
        a = torch.cat([b[name].a[:, 0] for b in blocks])
        b = torch.cat([b[name].b[:, 0] for b in blocks])
        roots = []
        for rows in (a, b):
            cov = rows.T @ rows / 40
            roots.append(
                raise_to(
                    cov + 0.2 * cov.trace() / len(cov) * torch.eye(len(cov), dtype=cov.dtype), -0.5
                )
            )
        gradient = randn(3, b.shape[1], a.shape[1])
        exact = roots[1] @ gradient @ roots[0]
        assert torch.allclose(
            built.metric[name].apply(gradient),
            exact,
            rtol=1e-8,
            atol=1e-8 * float(exact.abs().max()),
        )


def _width(built, name, side):
    return next(r["dim"] for r in built.report if r["layer"] == name and r["side"] == side)


@pytest.mark.parametrize("scale", ["probe", "balanced"])
@pytest.mark.parametrize("make", ["mlp", "cnn", "text"])
def test_the_median_norm_on_the_probe_is_kept(scale, make):
    model = {"mlp": mlp, "cnn": cnn, "text": Text}[make]()
    probe = {"mlp": FeatureNoise(12), "cnn": PinkNoise(CNN_SHAPE), "text": token_ids()}[make]
    kfac = make_kfac(probe=probe, scale=scale)
    built = kfac.build(model, capture, 0)
    plain, mapped = _norms(kfac, model, {}), _norms(kfac, model, built.metric)
    assert float(mapped.quantile(0.5)) == pytest.approx(float(plain.quantile(0.5)), rel=1e-5)
    assert built.scale > 0 and built.scale != 1.0


def test_trace_scale_is_mean_trace_one_before_damping():
    model = mlp().double()
    built = make_kfac(scale="trace", rank_tolerance=0.0, damping=0.3).build(model, capture, 0)
    raw = make_kfac(scale="raw", rank_tolerance=0.0, damping=0.3).build(model, capture, 0)
    for name, sides in built.spectra.items():
        for letter, side in (("A", "input"), ("G", "output")):
            width = _width(built, name, side)
            mean, x = float(sides[letter].sum()) / width, torch.eye(width, dtype=torch.float64)
            one, other = (
                getattr(built.metric[name], side).apply(x),
                getattr(raw.metric[name], side).apply(x),
            )
            assert torch.allclose(one, other * mean**0.5, rtol=1e-9, atol=1e-9)
    assert built.scale == raw.scale == 1.0


def test_a_layer_without_signal_is_the_identity_and_said_so():
    model = mlp()
    with torch.no_grad():
        model[2].weight.zero_()
    built = make_kfac(scale="raw").build(model, capture, 0)
    mean = float(built.spectra["2"]["G"].mean())
    # in the units of the other layer
    assert built.metric["0"].output == Identity(pytest.approx((1.1 * mean) ** -0.5))
    notes = {(r["layer"], r["side"]): r["note"] for r in built.report}
    assert "no signal" in notes["0", "output"] and notes["0", "input"] == ""
    assert all(
        torch.isfinite(t).all() for t in built.state_dict().values() if t.is_floating_point()
    )


def test_a_probe_without_a_gradient_leaves_norms_as_they_are():
    kfac = make_kfac(loss=lambda output, _: 0 * output.sum(1))
    assert kfac.build(mlp(), capture, 0).scale == 1.0


@pytest.mark.parametrize("sides", ["input", "output", "both"])
def test_a_table_that_is_called_on_no_position_has_no_signal(sides):
    kfac = make_kfac(probe=token_ids(rows=6, length=9), sides=sides)
    built = kfac.build(UnreadTable(), capture, 0)
    notes = {(r["layer"], r["side"]): r["note"] for r in built.report}
    assert "no signal" in notes["suffixes", "input"] and notes["table", "input"] == ""


def test_layer_rules_leave_the_others_scaled_but_in_shape():
    model = Text()
    kfac = make_kfac(probe=token_ids(), layer_rules=("linear",), scale="raw")
    built = kfac.build(model, capture, 0, rules=rules_of(model))
    assert isinstance(built.metric["head"].input, Dense)
    assert isinstance(built.metric["embedding"].input, Identity) and isinstance(
        built.metric["embedding"].output, Identity
    )
    assert built.metric["norm"].scale["weight"].unique().numel() == 1
    with pytest.raises(ValueError, match="layer_rules was set"):
        kfac.build(model, capture, 0)


def test_a_layer_that_the_probe_does_not_reach_keeps_the_identity(caplog):
    built = make_kfac().build(
        mlp(), capture, 0, rules={"0": "linear", "2": "linear", "unused": "linear"}
    )
    assert "unused" not in built.metric and "unused" in caplog.text
    assert [r["note"] for r in built.report if r["layer"] == "unused"] == [
        "not reached by the probe"
    ]


# -- invariants


class _Noisy(nn.Module):
    """Dropout, a random forward pass, and a buffer that every call overwrites."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("sparse", torch.eye(2).to_sparse())

    def forward(self, x):
        self.calls += 1
        self.seen = torch.cat([self.seen, x[:, 0]])
        return self.inner(self.drop(x)) + 1e-6 * torch.randn(())


def test_the_model_and_the_global_stream_are_left_as_they_were():
    model = _Noisy().train()
    model.inner[1].eval()
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, float(i))
    held, calls, seen = dict(model.named_parameters()), model.calls, model.seen
    before = {n: (p.detach().clone(), p.grad.clone(), p.requires_grad) for n, p in held.items()}
    modes = [m.training for m in model.modules()]
    state = torch.random.get_rng_state()
    make_kfac().build(model, capture, 0)
    assert torch.equal(state, torch.random.get_rng_state())
    assert [m.training for m in model.modules()] == modes
    assert (
        float(model.calls) == 0.0
        and model.calls is calls
        and model.seen is seen
        and not seen.numel()
    )
    for name, p in model.named_parameters():
        assert p is held[name] and p.requires_grad == before[name][2]
        assert torch.equal(p, before[name][0]) and torch.equal(p.grad, before[name][1])
    assert not any(m._forward_hooks for m in model.modules())


def test_the_stream_is_named_by_seed_and_step():
    model = mlp()
    digests = {
        make_kfac(seed=seed).build(model, capture, step).digest
        for seed, step in ((0, 0), (0, 50), (1, 0))
    }
    assert len(digests) == 3
    assert make_kfac().build(model, capture, 0).digest in digests
    draws = [
        torch.rand(1, generator=public_generator(*key)).item()
        for key in ((0, 1), (1, 0), (11, 1), (1, 11))
    ]
    assert len(set(draws)) == 4


def test_a_layer_whose_values_are_not_finite_is_named():
    def broken(model, loss):
        blocks = dict(capture(model, loss))
        blocks["2"] = Outer(blocks["2"].a, blocks["2"].b * float("inf"))
        return blocks

    with pytest.raises(ValueError, match="layer '2'.*NaN or infinity"):
        make_kfac().build(mlp(), broken, 0)


def test_blocks_that_do_not_fit_the_probe_are_an_error():
    def short(model, loss):
        return {n: Outer(b.a[:1], b.b[:1]) for n, b in capture(model, loss).items()}

    with pytest.raises(ValueError, match="layer '0': capture returned 1 examples instead of 8"):
        make_kfac().build(mlp(), short, 0)


@pytest.mark.gpu
def test_a_build_on_a_device_is_that_of_the_cpu():
    for model, probe in ((mlp(), FeatureNoise(12)), (Text(), token_ids())):
        kfac = make_kfac(probe=probe, damping=0.5, layer_rules=("linear", "embedding"))
        there = kfac.build(model.double().cuda(), capture, 0, rules_of(model))
        here = kfac.build(model.cpu(), capture, 0, rules_of(model))
        assert there.scale == pytest.approx(here.scale, rel=1e-9)
        for key, tensor in there.to("cpu").state_dict().items():
            if key.endswith(("root", "scale")):
                assert torch.allclose(tensor, here.state_dict()[key], rtol=1e-8, atol=1e-10)
        assert all(t.is_cuda for key, t in there.state_dict().items() if key.startswith("metric"))


def test_without_any_block_every_layer_keeps_the_identity():
    built = make_kfac().build(mlp(), lambda model, loss: {}, 0)
    assert built.metric == {} and built.scale == 1.0
