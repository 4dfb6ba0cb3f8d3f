"""Methods combined through a session: each step against brute force, and wrong ones refused."""

from __future__ import annotations

import pytest
import torch

from dpkfc.postprocess import EMA, SOFIM, AdamBC, DiSK, LowPass
from dpkfc.postprocess.pipeline import check_with_optimizer
from tests.mutation_cases import kfac, loss_fn, net, plan, session

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
