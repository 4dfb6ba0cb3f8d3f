"""Methods combined through a session: each step against brute force, and wrong ones refused."""

import pytest
import torch

from dpkfc.gradients.discovery import find_layers
from dpkfc.postprocess import EMA, SOFIM, AdamBC, DiSK, LowPass
from dpkfc.postprocess.pipeline import check_with_optimizer
from tests.gradients.whitened import whiten
from tests.mutation_cases import B, data, kfac, net, plan, session, weights
from tests.sessions import cross_entropy as loss_fn


@pytest.mark.parametrize(
    ("disk", "optimizer"),
    [
        (DiSK(0.4, 0.5), torch.optim.SGD),
        (DiSK(0.6, mode="look_ahead"), torch.optim.Adam),
        (DiSK(0.3, mode="storm"), torch.optim.AdamW),
    ],
    ids=["two points", "look ahead", "storm"],
)
def test_dp_kfc_with_disk_equals_brute_force(disk, optimizer):
    """Without noise: P (c g(θ + γ d) + (1 − c) g(θ)), clipped once, averaged, stepped; the metric
    is rebuilt on the way.
    """
    p = plan(0.0, preconditioner=kfac(), postprocess=[disk], max_grad_norm=0.4)
    model, theirs, (x, y) = net(), net(), data()
    reference, layers = optimizer(theirs.parameters(), 0.05), find_layers(theirs)
    average = {}
    before = None
    with session(p, model, optimizer(model.parameters(), 0.05)) as s:
        for batch in s.batches():
            s.step(batch, loss_fn)
            own = {n: q.detach().clone() for n, q in theirs.named_parameters()}
            points = (
                [(0.0, 1.0)]
                if before is None
                else [(e.lookahead, e.weight) for e in disk.evaluations]
            )
            rows = []
            for i in batch.indices:
                row = {n: torch.zeros_like(q) for n, q in own.items()}
                for ahead, weight in points:
                    with torch.no_grad():
                        for n, q in theirs.named_parameters():
                            q.copy_(
                                own[n] if before is None else own[n] + ahead * (own[n] - before[n])
                            )
                    loss = loss_fn(theirs, (x[i : i + 1], y[i : i + 1])).sum()
                    for n, g in zip(
                        row, torch.autograd.grad(loss, list(theirs.parameters())), strict=True
                    ):
                        row[n] += weight * g
                z = {
                    k: v
                    for layer in layers
                    for k, v in whiten(layer, s.preconditioner.metric.get(layer.name), row).items()
                }
                length = float(torch.stack([v.square().sum() for v in z.values()]).sum().sqrt())
                rows.append({n: min(1.0, 0.4 / length) * v for n, v in z.items()})
            with torch.no_grad():
                for n, q in theirs.named_parameters():
                    q.copy_(own[n])
                    g = sum((row[n] for row in rows), torch.zeros_like(q)) / B
                    average[n] = (
                        g if before is None else (1 - disk.kappa) * average[n] + disk.kappa * g
                    )
                    q.grad = average[n].clone()
            reference.step()
            before = own
    torch.testing.assert_close(weights(model), weights(theirs), rtol=1e-7, atol=1e-9)


# -- what does not go together ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (
            [AdamBC(), AdamBC()],
            "AdamBC needs the variance of the noise, which is not known behind the adaptive step"
            " AdamBC",
        ),
        (
            [SOFIM(), AdamBC()],
            "AdamBC needs the variance of the noise.*behind the adaptive step SOFIM",
        ),
        ([DiSK(), LowPass(), AdamBC()], "not known behind two filters \\(DiSK and LowPass\\)"),
        (
            [AdamBC(), DiSK()],
            "the filter DiSK stands behind the adaptive step AdamBC; filters come first",
        ),
        ([AdamBC(), SOFIM()], "SOFIM would rescale what AdamBC has rescaled"),
        ([DiSK(), DiSK(0.2)], "only one step can decide where gradients are taken"),
        ([kfac()], "KFAC in postprocess.*preconditioner="),
        (
            [torch.optim.Adam([torch.zeros(1)])],
            "Adam in postprocess.*give a torch optimizer to the session",
        ),
    ],
    ids=str,
)
def test_steps_that_do_not_go_together_are_refused_when_the_config_is_made(steps, words):
    with pytest.raises(ValueError, match=words):
        plan(postprocess=steps)


@pytest.mark.parametrize("filter_", [DiSK(), EMA(), LowPass(), AdamBC(), SOFIM()], ids=str)
def test_a_filter_is_no_preconditioner(filter_):
    with pytest.raises(
        ValueError, match=f"{type(filter_).__name__} acts on releases.*postprocess="
    ):
        plan(preconditioner=filter_)


@pytest.mark.parametrize("filter_", [DiSK, EMA, LowPass], ids=lambda kind: kind.__name__)
def test_momentum_on_a_filter_is_refused_unless_asked_for(filter_):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with pytest.raises(
        ValueError, match=f"momentum on top of the filter {filter_.__name__}.*momentum_allowed=True"
    ):
        session(plan(postprocess=[filter_()]), model, optimizer)
    with session(plan(postprocess=[filter_(momentum_allowed=True)]), model, optimizer) as s:
        s.step(next(s.batches()), loss_fn)


OPTIMIZERS = {"Adam": {}, "RMSprop": {}, "Rprop": {}, "LBFGS": {}, "SGD": {"momentum": 0.9}}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("step", [AdamBC(), SOFIM()], ids=["AdamBC", "SOFIM"])
def test_nothing_but_plain_sgd_stands_behind_an_adaptive_step(step, name):
    model = net()
    with pytest.raises(
        ValueError,
        match=f"so {name} .*use torch.optim.SGD without momentum|LBFGS steps with a closure",
    ):
        session(
            plan(postprocess=[step]),
            model,
            getattr(torch.optim, name)(model.parameters(), lr=0.1, **OPTIMIZERS[name]),
        )
    check_with_optimizer([step], torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1))
