"""DiSK against its equations: the combination of two gradients, its points, the filter, and what is
refused.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpkfc.data.loading import layout
from dpkfc.gradients.clipped_sum import AT_MODEL_PARAMETERS, Clip, EvaluationPoint, clipped_sum
from dpkfc.gradients.discovery import find_layers
from dpkfc.postprocess import EMA, DiSK
from dpkfc.postprocess.pipeline import AT_PARAMETERS
from tests.mutation_cases import N, loss_fn, net, plan, session, weights
from tests.postprocess.cases import noise_gain, run
from tests.recording import Heard

MODES = ["two_point", "look_ahead", "storm"]


def trained(*, steps: int = 6, **settings: object) -> Tensor:
    model = net()
    with session(plan(**settings), model) as s:
        for batch in s.batches():
            s.step(batch, loss_fn)
    return weights(model)


# -- kappa = 1, and the number of passes -----------------------------------------------------------


@pytest.mark.parametrize("init", ["first", "zero", "bias_corrected"])
@pytest.mark.parametrize("mode", MODES)
def test_kappa_one_is_dp_sgd_to_the_bit(mode: str, init: str) -> None:
    assert torch.equal(trained(), trained(postprocess=[DiSK(kappa=1.0, mode=mode, init=init)]))


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
def test_passes_through_the_model(disk: DiSK | EMA, first: int, later: int) -> None:
    calls: list[int] = Heard()

    def counting(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls[-1] += 1
        return loss_fn(model, batch)

    with session(plan(postprocess=[disk]), net(), verify=False) as s:
        for batch in s.batches():
            calls.append(0)
            s.step(batch, counting)
    assert calls == [first] + [later] * 5


def test_weights_and_points_of_the_modes() -> None:
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
    assert DiSK(1.0, mode="storm").evaluations == AT_PARAMETERS


# -- the finite difference -------------------------------------------------------------------------


def quadratic() -> tuple[nn.Module, tuple[Tensor, Tensor], Tensor]:
    """Least squares: the model, the data, and the Hessian of the summed losses."""
    torch.manual_seed(0)
    x, y = torch.randn(N, 4).double(), torch.randn(N).double()
    return nn.Linear(4, 1, bias=False).double(), (x, y), x.T @ x


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return 0.5 * (model(batch[0]).squeeze(1) - batch[1]) ** 2


@pytest.mark.parametrize("kappa", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("gamma", [-1.0, 0.3, 1.0, 7.0])
def test_on_a_quadratic_the_combination_is_the_gradient_plus_hessian_times_d_for_every_gamma(
    kappa: float, gamma: float
) -> None:
    model, batch, hessian = quadratic()
    d = torch.randn(1, 4).double()
    points = [
        EvaluationPoint({"weight": model.weight.detach() + e.lookahead * d}, e.weight)
        for e in DiSK(kappa, gamma).evaluations
    ]
    results = []
    for at in (points, (AT_MODEL_PARAMETERS,)):
        total, _ = clipped_sum(
            model,
            find_layers(model),
            {},
            Clip(1e9),
            loss_fn=squares,
            micro_batches=parts(batch),
            points=at,
        )
        results.append(total["weight"])
    torch.testing.assert_close(
        results[0], results[1] + (1 - kappa) / kappa * d @ hessian, rtol=1e-9, atol=1e-8
    )


def parts(batch: tuple[Tensor, ...]) -> list:
    return [(batch, part) for part in layout(np.arange(len(batch[0])))]


@pytest.mark.parametrize(
    "disk", [DiSK(0.3, 0.5), DiSK(0.7), DiSK(0.5, mode="look_ahead"), DiSK(0.2, mode="storm")]
)
def test_on_a_quadratic_without_noise_the_filter_follows_the_gradient_exactly(disk: DiSK) -> None:
    """With its first value right, what the Hessian moves on is right for ever: DiSK is gradient
    descent.

    With one pass (look-ahead) the gradient is the same, because c = 1.
    """
    runs = []
    for steps in ((), (disk,)):
        model, batch, _ = quadratic()
        p = plan(0.0, expected_batch_size=N, sampler="fixed", max_grad_norm=1e9, postprocess=steps)
        with session(p, model, torch.optim.SGD(model.parameters(), 0.2), dataset=batch) as s:
            for logical in s.batches():
                s.step(logical, squares)
        runs.append(weights(model))
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-9, atol=1e-11)


def test_the_average_alone_lags_behind_on_the_same_quadratic() -> None:
    runs = []
    for steps in ((), (EMA(0.3),)):
        model, batch, _ = quadratic()
        p = plan(0.0, expected_batch_size=N, sampler="fixed", max_grad_norm=1e9, postprocess=steps)
        with session(p, model, torch.optim.SGD(model.parameters(), 0.2), dataset=batch) as s:
            for logical in s.batches():
                s.step(logical, squares)
        runs.append(weights(model))
    assert float((runs[1] - runs[0]).norm()) > 1e-2


def test_both_points_see_the_same_random_numbers() -> None:
    """At equal parameters c g + (1 − c) g must be g, dropout included; the masks differ between two
    micro-batches.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double().train()
    batch = (torch.randn(7, 6).double(), torch.randint(0, 3, (7,)))
    same = {name: p.detach().clone() for name, p in model.named_parameters()}
    results = []
    for points in (
        (AT_MODEL_PARAMETERS,),
        (EvaluationPoint(same, -9.0), EvaluationPoint(None, 10.0)),
    ):
        torch.manual_seed(3)
        micro = [
            ((batch[0][rows], batch[1][rows]), part)
            for rows in (slice(0, 4), slice(4, 7))
            for part in layout(np.arange(rows.stop - rows.start))
        ]
        results.append(
            clipped_sum(
                model,
                find_layers(model),
                {},
                Clip(0.5),
                loss_fn=loss_fn,
                micro_batches=micro,
                points=points,
                repeatable=True,
            )[0]
        )
    for name in same:
        torch.testing.assert_close(results[1][name], results[0][name], rtol=1e-9, atol=1e-10)
    assert all(torch.equal(p, same[name]) for name, p in model.named_parameters())


# -- Nesterov's momentum, Appendix A.4 of the paper ------------------------------------------------

RATE = 0.02


def weights_of_disk(kappa: float, gamma: float) -> Tensor:
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


def weights_of_nesterov(momentum: float, ahead: float) -> Tensor:
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
def test_with_one_point_disk_is_nesterovs_momentum_with_its_own_look_ahead(kappa: float) -> None:
    """At c = 1 the velocity is the last step, the momentum is 1 − κ, and κ scales the rate."""
    ahead = (1 - kappa) / kappa
    torch.testing.assert_close(
        weights_of_disk(kappa, ahead).flatten(),
        weights_of_nesterov(1 - kappa, ahead),
        rtol=1e-9,
        atol=1e-12,
    )


def test_the_limit_of_disk_is_nesterovs_momentum() -> None:
    """Nesterov looks 1 − κ ahead, DiSK (1 − κ) / κ: they differ in the second order of 1 − κ."""
    apart = []
    for momentum in (0.2, 0.1, 0.05):
        kappa = 1 - momentum
        disk = weights_of_disk(kappa, momentum / kappa).flatten()
        apart.append(float((disk - weights_of_nesterov(momentum, momentum)).norm()))
    # Half the momentum leaves a quarter of the distance.
    assert apart[0] > 3.5 * apart[1] > 3.5 * 3.5 * apart[2] > 0


# -- the matrix gain of Algorithm 2 ----------------------------------------------------------------


def test_the_matrix_gain_settles_on_the_scalar_gain_of_every_direction() -> None:
    """Algorithm 2 with an exact Hessian-vector product: P ← P + Q, K = P (P + R)⁻¹, P ← (I − K) P.

    Q is the variance of the gradient's change, R = I that of a release. On the 32 weights of a
    regression Q has the directions of the inputs, and the gain of each is that of its own ratio.
    Where all ratios are one, the gain is the single κ of DiSK.
    """
    inputs = torch.randn(200, 32, generator=torch.Generator().manual_seed(0)).double()
    change = inputs.T @ inputs / 200
    release = torch.eye(32).double()
    for q in (change, 0.5 * release):
        covariance = release.clone()
        for _ in range(300):
            predicted = covariance + q
            gain = predicted @ torch.linalg.inv(predicted + release)
            covariance = (release - gain) @ predicted
        ratios, directions = torch.linalg.eigh(q)
        settled = (torch.sqrt(ratios.square() + 4 * ratios) - ratios) / 2
        expected = directions @ torch.diag(settled) @ directions.T
        torch.testing.assert_close(gain, expected, rtol=1e-6, atol=1e-8)


# -- the filter ------------------------------------------------------------------------------------


def test_kappa_is_the_weight_of_the_new_release() -> None:
    inputs = [torch.tensor([x]).double() for x in (1.0, 5.0, -2.0)]
    first = [float(r.gradients["w"]) for r in run(DiSK(0.7), inputs)]
    assert first == pytest.approx([1.0, 0.3 * 1 + 0.7 * 5, 0.3 * 3.8 + 0.7 * -2])
    zero = [float(r.gradients["w"]) for r in run(DiSK(0.7, init="zero"), inputs)]
    assert zero == pytest.approx([0.7, 0.3 * 0.7 + 0.7 * 5, 0.3 * 3.71 + 0.7 * -2])
    corrected = [float(r.gradients["w"]) for r in run(DiSK(0.7, init="bias_corrected"), inputs)]
    assert corrected == pytest.approx([z / (1 - 0.3 ** (t + 1)) for t, z in enumerate(zero)])


@pytest.mark.parametrize(
    ("kappa", "gain"), [(0.1, 0.0526), (0.3, 0.176), (0.5, 0.333), (0.7, 0.538), (0.9, 0.818)]
)
@pytest.mark.parametrize("init", ["first", "zero", "bias_corrected"])
def test_noise_gain_of_the_average(kappa: float, gain: float, init: str) -> None:
    disk = DiSK(kappa, init=init)
    assert noise_gain(disk, 300) == pytest.approx(gain, abs=5e-4)
    nu = sum(kappa**2 * (1 - kappa) ** (2 * s) for s in range(5))
    expected = {"zero": nu, "bias_corrected": nu / (1 - (1 - kappa) ** 5) ** 2}
    expected["first"] = nu + (1 - kappa) ** 8 * (1 - kappa**2)
    assert noise_gain(disk, 4) == pytest.approx(expected[init])


def test_values_outside_their_range_are_refused_with_the_fix() -> None:
    for kappa in (0.0, -0.1, 1.5, math.nan):
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


def test_automatic_micro_batches_are_measured_with_both_points() -> None:
    """The first step has one point; a size found with it would be twice too large for all later
    ones.
    """
    counts = []
    for steps in ((), (DiSK(0.5),)):
        calls: list[int] = Heard()

        def counting(
            model: nn.Module, batch: tuple[Tensor, Tensor], calls: list[int] = calls
        ) -> Tensor:
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
