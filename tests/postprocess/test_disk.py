"""DiSK against its equations: the combination of two gradients, its points, the filter, and what is
refused.
"""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from dpkfc.gradients.evaluation_points import AT_MODEL_PARAMETERS, EvaluationPoint
from dpkfc.postprocess import EMA, DiSK
from dpkfc.postprocess.protocol import AT_PARAMETERS
from tests.gradients.cases import sum_examples
from tests.mutation_cases import N, net, plan, session, weights
from tests.postprocess.cases import run
from tests.recording import Heard
from tests.sessions import cross_entropy as loss_fn

MODES = ["two_point", "look_ahead", "storm"]


def train_disk(*, steps=6, **settings):
    model = net()
    with session(plan(**settings), model) as s:
        for batch in s.batches():
            s.step(batch, loss_fn)
    return weights(model)


# -- kappa = 1, and the number of passes -----------------------------------------------------------


@pytest.mark.parametrize("init", ["first", "zero", "bias_corrected"])
@pytest.mark.parametrize("mode", MODES)
def test_kappa_one_is_dp_sgd_to_the_bit(mode, init):
    assert torch.equal(
        train_disk(), train_disk(postprocess=[DiSK(kappa=1.0, mode=mode, init=init)])
    )


@pytest.mark.parametrize(
    ("disk", "first", "later"),
    [
        (DiSK(0.5, mode="look_ahead"), 1, 1),
        (DiSK(0.7, gamma=(1 - 0.7) / 0.7), 1, 1),  # c = 1 as well
        (DiSK(0.5, 0.7), 1, 2),
        (DiSK(0.1, mode="storm"), 1, 2),
        (DiSK(1.0), 1, 1),
        (EMA(0.5), 1, 1),
    ],
)
def test_passes_through_the_model(disk, first, later):
    calls = Heard()

    def counting(model, batch):
        calls[-1] += 1
        return loss_fn(model, batch)

    with session(plan(postprocess=[disk]), net(), verify=False) as s:
        for batch in s.batches():
            calls.append(0)
            s.step(batch, counting)
    assert calls == [first] + [later] * 5


def test_weights_and_points_of_the_modes():
    (point,) = DiSK(0.7, mode="look_ahead").evaluations
    assert point.weight == 1 and point.lookahead == pytest.approx(0.3 / 0.7)
    ahead, here = DiSK(0.7, 0.5).evaluations
    assert (ahead.lookahead, here.lookahead) == (0.5, 0.0) and ahead.weight == pytest.approx(
        0.3 / 0.35
    )
    back, here = DiSK(0.1, mode="storm").evaluations
    assert (
        back.lookahead == -1
        and back.weight == pytest.approx(-9)
        and here.weight == pytest.approx(10)
    )
    assert all(
        sum(p.weight for p in DiSK(k, g).evaluations) == pytest.approx(1)
        for k in (0.1, 0.9)
        for g in (-2, 0.3, 1)
    )
    for mode in ("look_ahead", "storm", "two_point"):
        assert (
            DiSK(1.0, mode=mode).evaluations == AT_PARAMETERS and DiSK(1.0, mode=mode).weight == 0
        )


# -- the finite difference -------------------------------------------------------------------------


def quadratic():
    """Least squares: the model, the data, and the Hessian of the summed losses."""
    torch.manual_seed(0)
    x, y = torch.randn(N, 4).double(), torch.randn(N).double()
    return nn.Linear(4, 1, bias=False).double(), (x, y), x.T @ x


def squares(model, batch):
    return 0.5 * (model(batch[0]).squeeze(1) - batch[1]) ** 2


@pytest.mark.parametrize("kappa", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("gamma", [-1.0, 0.3, 1.0, 7.0])
def test_on_a_quadratic_the_combination_is_the_gradient_plus_hessian_times_d_for_every_gamma(
    kappa, gamma
):
    model, batch, hessian = quadratic()
    d = torch.randn(1, 4).double()
    points = [
        EvaluationPoint({"weight": model.weight.detach() + e.lookahead * d}, e.weight)
        for e in DiSK(kappa, gamma).evaluations
    ]
    results = []
    for at in (points, (AT_MODEL_PARAMETERS,)):
        total, _ = sum_examples(model, batch, 1e9, squares, points=at)
        results.append(total["weight"])
    assert_close(results[0], results[1] + (1 - kappa) / kappa * d @ hessian, rtol=1e-9, atol=1e-8)


# -- Nesterov's momentum, Appendix A.4 of the paper ------------------------------------------------

RATE = 0.02


def weights_of_disk(kappa, gamma):
    """Return the weights after 12 steps of SGD behind DiSK, without noise and without a clip."""
    model, batch, _ = quadratic()
    p = plan(
        0.0,
        steps=12,
        expected_batch_size=N,
        sampler="fixed",
        max_grad_norm=1e9,
        postprocess=(DiSK(kappa, gamma, init="zero"),),
    )
    optimizer = torch.optim.SGD(model.parameters(), RATE / kappa)
    with session(p, model, optimizer, dataset=batch) as s:
        for logical in s.batches():
            s.step(logical, squares)
    return weights(model)


def weights_of_nesterov(momentum, ahead):
    """Return the weights after 12 steps v ← μ v − η ∇f(θ + ahead · v), θ ← θ + v."""
    model, (x, y), _ = quadratic()
    theta = model.weight.detach().squeeze(0).clone()
    velocity = torch.zeros_like(theta)
    for _ in range(12):
        gradient = x.T @ (x @ (theta + ahead * velocity) - y) / N
        velocity = momentum * velocity - RATE * gradient
        theta = theta + velocity
    return theta


@pytest.mark.parametrize("kappa", [0.1, 0.5, 0.9])
def test_with_one_point_disk_is_nesterovs_momentum_with_its_own_look_ahead(kappa):
    """At c = 1 the velocity is the last step, the momentum is 1 − κ, and κ scales the rate."""
    ahead = (1 - kappa) / kappa
    assert_close(
        weights_of_disk(kappa, ahead).flatten(),
        weights_of_nesterov(1 - kappa, ahead),
        rtol=1e-9,
        atol=1e-12,
    )


# -- the filter ------------------------------------------------------------------------------------


def test_kappa_is_the_weight_of_the_new_release():
    inputs = [torch.tensor([x]).double() for x in (1.0, 5.0, -2.0)]
    first = [float(r.gradients["w"]) for r in run(DiSK(0.7), inputs)]
    assert first == pytest.approx([1.0, 0.3 * 1 + 0.7 * 5, 0.3 * 3.8 + 0.7 * -2])
    zero = [float(r.gradients["w"]) for r in run(DiSK(0.7, init="zero"), inputs)]
    assert zero == pytest.approx([0.7, 0.3 * 0.7 + 0.7 * 5, 0.3 * 3.71 + 0.7 * -2])
    corrected = [float(r.gradients["w"]) for r in run(DiSK(0.7, init="bias_corrected"), inputs)]
    assert corrected == pytest.approx([z / (1 - 0.3 ** (t + 1)) for t, z in enumerate(zero)])


def test_values_outside_their_range_are_refused_with_the_fix():
    for kappa in (0.0, -0.1, 1.5, math.nan, True):
        with pytest.raises(
            ValueError, match=r"kappa of DiSK must lie in \(0, 1\].*weight of the new release"
        ):
            DiSK(kappa)
    with pytest.raises(ValueError, match="gamma of DiSK must be finite and not 0.*look_ahead"):
        DiSK(0.7, 0.0)
    with pytest.raises(
        ValueError, match=r"mode='storm' of DiSK means gamma=-1, got 0.5; leave gamma out"
    ):
        DiSK(0.7, 0.5, mode="storm")
    with pytest.raises(ValueError, match=r"not DiSK: use EMA\(kappa=...\)"):
        DiSK(0.7, mode="ema")
    with pytest.raises(
        ValueError, match="mode of DiSK must be one of two_point, look_ahead, storm"
    ):
        DiSK(mode="full")
    with pytest.raises(ValueError, match="init of DiSK must be one of first, zero, bias_corrected"):
        DiSK(init="none")


def test_automatic_micro_batches_are_measured_with_both_points():
    """The first step has one point; a size found with it would be twice too large for all later
    ones.
    """
    counts = []
    for steps in ((), (DiSK(0.5),)):
        calls = Heard()

        def counting(model, batch, calls=calls):
            calls.append(1)
            return loss_fn(model, batch)

        p = plan(
            postprocess=steps,
            max_physical_batch_size="auto",
            expected_batch_size=N,
            sampler="fixed",
        )
        with session(p, net(), verify=False) as s:
            s.step(next(s.batches()), counting)
        counts.append(len(calls))
    assert counts[1] == 2 * (counts[0] - 1) + 1 > 2
