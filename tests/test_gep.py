"""GEP from the settings to the step: one event for both parts, a session against brute force, and a
run that goes on.
"""

from dataclasses import replace

import dp_accounting
import pytest
import torch
from torch.testing import assert_close

from dpkfc.config import PrivacyConfig
from dpkfc.curvature.gep import GEP
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.noise_probes import FeatureNoise
from dpkfc.linalg.subspace import EMBEDDING, Subspace
from dpkfc.postprocess.readout import read_out
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.mechanism import ClippedSum, Released, release
from dpkfc.session import Session
from tests.gradients.whitened import flat, loop_gradients, stack_directions
from tests.test_session import data, loss_fn, net, plan, train, weights

S1, S2 = 0.6, 0.4


def gep(**settings):
    options = {
        "probe": FeatureNoise(6),
        "rank": 5,
        "groups": 2,
        "probe_size": 32,
        "embedding_norm": S1,
        "residual_norm": S2,
    }
    return GEP(**{**options, **settings})


def split(noise=0.0, config=None, **settings):
    config = config or gep()
    return plan(noise, preconditioner=config, clipping=config.required_clipping, **settings)


# -- accounting ------------------------------------------------------------------------------------


def account_by_rdp(noise, steps, orders=None):
    """dp-accounting's own ε at q = .02, δ = 1e-5."""
    accountant = dp_accounting.rdp.RdpAccountant(orders)
    accountant.compose(
        dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(noise)), steps
    )
    return float(accountant.get_epsilon(1e-5))


def test_without_a_residual_a_step_costs_what_one_of_dp_sgd_costs():
    settings = {"expected_batch_size": 200, "steps": 100, "accountant": "rdp"}
    config = gep(residual_norm=None)
    p = PrivacyConfig(preconditioner=config, clipping="embedding", **settings).with_noise(
        1.0, 1e-5, 10_000
    )
    other = PrivacyConfig(**settings).with_noise(1.0, 1e-5, 10_000)
    assert p.sensitivity == 1.0 and p.epsilon() == other.epsilon() and p.hash != other.hash


# -- settings that do not go together --------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preconditioner": gep()}, "needs clipping='embedding_residual', not 'flat'"),
        (
            {"preconditioner": gep(), "clipping": "embedding"},
            "needs clipping='embedding_residual', not 'embedding'",
        ),
        (
            {"preconditioner": gep(residual_norm=None), "clipping": "embedding_residual"},
            "needs clipping='embedding'",
        ),
        ({"clipping": "embedding_residual"}, "needs preconditioner=GEP"),
        (
            {"preconditioner": KFAC(probe=FeatureNoise(6)), "clipping": "embedding"},
            "needs preconditioner=GEP",
        ),
        (
            {"preconditioner": gep(), "clipping": "embedding_residual", "max_grad_norm": 2.0},
            "leave max_grad_norm at 1",
        ),
        (
            {"preconditioner": gep(), "clipping": "embedding_residual", "readout": "natural"},
            "readout='natural'",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PrivacyConfig(expected_batch_size=8, steps=3, **settings)


def test_a_sum_that_was_clipped_otherwise_is_not_released():
    p = split(1.0)
    ledger = Ledger.open(None, p.hash, {}, p.steps)
    with pytest.raises(ValueError, match="the plan assumes"):
        release(
            ClippedSum({EMBEDDING: torch.zeros(5)}, 1.0, "embedding"),
            p,
            p.noise_stream(),
            ledger,
            0,
        )
    assert ledger.count == 0


# -- the step --------------------------------------------------------------------------------------


@pytest.mark.parametrize("residual_norm", [S2, None])
@pytest.mark.parametrize("micro", [None, 3])
def test_a_session_without_noise_takes_the_step_of_the_paper(residual_norm, micro):
    """θ ← θ − η/B (L Σ clip_S₁(w) + Σ clip_S₂(r)), by loops and dense matrices."""
    model, (x, y) = net(), data()
    p = split(0.0, gep(residual_norm=residual_norm), steps=3, max_physical_batch_size=micro)
    with Session(p, model, torch.optim.SGD(model.parameters(), 0.5), (x, y)) as s:
        for batch in s.batches():
            before = weights(model)
            rows = loop_gradients(model, (x[batch.indices], y[batch.indices]), loss_fn)
            s.step(batch, loss_fn)
            assert isinstance(s.preconditioner.metric, Subspace)
            matrix = stack_directions(model, s.preconditioner.metric)
            step = torch.zeros_like(before)
            for g in map(flat, rows):
                w = matrix.T @ g
                r = g - matrix @ w
                step += matrix @ w * min(1.0, S1 / float(w.norm()))
                step += r * min(1.0, residual_norm / float(r.norm())) if residual_norm else 0.0
            assert_close(weights(model), before - 0.5 / 8 * step, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("share", [0.5, 0.25])
@pytest.mark.parametrize(("residual_norm", "reached"), [(S2, 2), (S2, 1), (None, 2)])
def test_the_noise_of_every_entry_is_known(share, residual_norm, reached):
    """The read-out is linear: its matrix, column by column, says what variance every entry has."""
    model, p = net(), split(1.0, gep(share=share, residual_norm=residual_norm))
    with Session(p, model, torch.optim.SGD(model.parameters(), 0.0), data()) as s:
        train(s, 1)
        basis, layers = s.preconditioner.metric, s.layers
    spans = list(basis.spans.items())
    assert len(spans) == 2
    basis = replace(basis, spans=dict(spans[:reached]))
    own = {} if residual_norm is None else {n: q.shape for n, q in model.named_parameters()}
    shapes = {EMBEDDING: torch.Size([basis.width]), **own}
    columns, sizes = [], [shape.numel() for shape in shapes.values()]
    for one in torch.eye(sum(sizes), dtype=torch.float64):
        noise = {n: x.view(shapes[n]) for n, x in zip(shapes, one.split(sizes), strict=True)}
        found = read_out(
            Released(gradients=noise, noise_variance=0.25, step=0, release=1),
            basis,
            layers,
            "whitened",
        )
        assert set(found.gradients) == {n for n, _ in model.named_parameters()}
        columns.append(
            torch.cat([found.gradients[n].flatten() for n, _ in model.named_parameters()])
        )
    stated = torch.cat(
        [
            torch.as_tensor(found.variance_of(n), dtype=torch.float64).expand(q.shape).flatten()
            for n, q in model.named_parameters()
        ]
    )
    assert_close(stated, 0.25 * torch.stack(columns).square().sum(0), rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="before any other post-processing"):
        read_out(found, basis, layers, "whitened")
