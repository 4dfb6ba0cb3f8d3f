"""What reaches the optimizer is one release a logical batch: its noise, its divisor, its clip, and
nothing beside it.
"""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from dpkfc.config import PrivacyConfig
from tests.mutation_cases import WIDTH, B, Handed, N, data, flat, kfac, net, plan, session, weights
from tests.sessions import cross_entropy as loss_fn

# -- the law of the noise, through the whole session -----------------------------------------------

WIDE, STEPS = 200, 10


def wide():
    """120,600 numbers: ten steps of it make the 1.2 million that tell 98 % of a standard deviation
    from all of it.
    """
    torch.manual_seed(0)
    layers = [
        nn.Linear(WIDE, WIDE),
        nn.Tanh(),
        nn.Linear(WIDE, WIDE),
        nn.Tanh(),
        nn.Linear(WIDE, WIDE),
    ]
    return nn.Sequential(*layers).double()


def silent(model, batch):
    """A loss without a gradient: what is released is noise alone."""
    return 0 * loss_fn(model, batch)


def noise_of_a_run(noise_multiplier, **settings):
    """What the optimizer is handed in ten steps of pure noise, in units of the noise's own standard
    deviation.
    """
    values = {"expected_batch_size": B, "steps": STEPS, "max_grad_norm": 0.7, **settings}
    p = PrivacyConfig(**values).with_noise(noise_multiplier, 1e-3, N)
    model = wide()
    optimizer = Handed(model)
    with session(p, model, optimizer, dataset=data(width=WIDE)) as s:
        sizes = [s.step(batch, silent).batch_size for batch in s.batches()]
    assert p.stddev == pytest.approx(noise_multiplier * 0.7)
    unit = noise_multiplier * 0.7 / B
    return [{name: g / unit for name, g in handed.items()} for handed in optimizer.handed], sizes, p


def p_value(z, stddev):
    """Two-sided p-value of independent N(0, stddev²)."""
    law, total = stats.chi2(z.numel()), float((z / stddev).square().sum())
    return 2 * min(law.cdf(total), law.sf(total))


@pytest.mark.quick("micro-batches and a metric")
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_physical_batch_size": 2, "preconditioner": kfac(WIDE, every=4)}],
    ids=["whole batches", "micro-batches and a metric"],
)
def test_noise_has_the_planned_law_in_every_step_and_every_parameter(settings):
    """98 % of the noise, noise for each micro-batch, a divisor that was drawn, a stream used twice:
    all show here.
    """
    steps, sizes, _ = noise_of_a_run(1.3, **settings)
    assert len(steps) == STEPS and len(set(sizes)) > 1
    everything = flat(z for step in steps for z in step.values())
    assert everything.numel() > 1_000_000
    assert p_value(everything, 1.0) > 1e-9
    assert p_value(everything, 0.98) < 1e-9 and p_value(everything, 1.02) < 1e-9
    assert stats.kstest(everything[::8].numpy(), "norm").pvalue > 1e-9
    assert abs(float(everything.mean())) < 7 / everything.numel() ** 0.5
    # Each step by itself: its noise knows neither the size of its batch nor the number of its
    # parts.
    for step in steps:
        assert float(flat(step.values()).std()) == pytest.approx(1, abs=0.015)
    # Each parameter by itself.
    for name in steps[0]:
        z = flat(step[name] for step in steps)
        assert float(z.std()) == pytest.approx(1, abs=5 / z.numel() ** 0.5), name
    # Every number is drawn once, at whatever offset a stream were used again. Two of a million
    # numbers of finite precision are equal by chance once in thousands of runs; three such pairs
    # never are.
    assert np.unique(everything.abs().numpy()).size >= everything.numel() - 2
    draws = torch.stack(
        [step[name].flatten() for step in steps for name in ("0.weight", "2.weight", "4.weight")]
    )
    correlation = torch.corrcoef(draws) - torch.eye(len(draws), dtype=draws.dtype)
    assert float(correlation.abs().max()) < 7 / WIDE


def test_every_parameter_gets_noise_of_its_own_type_and_place():
    """Half precision, one number alone, a frozen neighbour and an embedding of which one row is
    read.
    """

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, 5).bfloat16(), nn.Linear(5, 3)
            self.gain = nn.Parameter(torch.tensor([1.5]))
            self.table = nn.Embedding(7, 3)
            self.last.bias.requires_grad_(False)

        def forward(self, x):
            hidden = torch.tanh(self.first(x.bfloat16())).float() * self.gain
            return self.last(hidden) + self.table(torch.zeros(len(x), dtype=torch.long))

    model = Odd()
    optimizer = Handed(model)
    p = PrivacyConfig(expected_batch_size=B, steps=20).with_noise(1.0, 1e-3, N)
    with session(p, model, optimizer, verify=False) as s:
        for batch in s.batches():
            s.step(batch, silent)
    trained = {name for name, q in model.named_parameters() if q.requires_grad}
    assert "gain" in trained and "last.bias" not in trained
    for handed in optimizer.handed:
        assert set(handed) == trained
        assert all(bool((g != 0).all()) for g in handed.values())
        assert all(g.dtype == model.get_parameter(name).dtype for name, g in handed.items())
    # in float32 two may be equal by chance
    assert len({float(handed["gain"]) for handed in optimizer.handed}) >= 19


# -- what lies in .grad ----------------------------------------------------------------------------


def leave_gradients(model, value=1e6):
    for q in model.parameters():
        q.grad = torch.full_like(q, value)


def test_gradients_that_the_user_left_reach_nothing():
    """Before the session, between steps, and inside loss_fn; on trained and on frozen
    parameters.
    """

    def careless(model, batch):
        leave_gradients(model)
        return loss_fn(model, batch)

    results = []
    for stale in (False, True):
        model = net()
        model[0].bias.requires_grad_(False)
        frozen = model[0].bias.detach().clone()
        optimizer = Handed(model, momentum=0.9, weight_decay=0.01)
        if stale:
            leave_gradients(model)
        with session(plan(max_physical_batch_size=3, preconditioner=kfac()), model, optimizer) as s:
            for batch in s.batches():
                if stale:
                    leave_gradients(model)
                s.step(batch, careless if stale else loss_fn)
                assert all(q.grad is None for q in model.parameters())
        assert all("0.bias" not in handed for handed in optimizer.handed)
        assert torch.equal(model[0].bias, frozen)
        results.append(weights(model))
    assert torch.equal(*results)


def test_a_backward_pass_of_the_user_inside_the_loss_reaches_nothing():
    results = []
    for greedy in (False, True):
        model = net()

        def losses(m, batch, greedy=greedy):
            found = loss_fn(m, batch)
            if greedy:
                (1e6 * found.sum()).backward(retain_graph=True)
            return found

        with session(plan(), model) as s:
            for batch in s.batches():
                s.step(batch, losses)
        results.append(weights(model))
    assert torch.equal(*results)
