"""What reaches the optimizer is one release a logical batch: its noise, its divisor, its clip, and
nothing beside it.
"""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from dpkfc.config import PrivacyConfig
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.layer_contributions import capture
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.mechanism import ClippedSum, release
from tests.mutation_cases import (
    WIDTH,
    B,
    Handed,
    N,
    data,
    flat,
    kfac,
    loss_fn,
    net,
    plan,
    session,
    weights,
)
from tests.recording import Heard

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


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_physical_batch_size": 2, "preconditioner": kfac(WIDE, every=4)}],
    ids=["whole batches", "micro-batches and a metric"],
)
def test_noise_has_the_planned_law_in_every_step_and_every_parameter(
    settings,
):
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


# -- an empty batch --------------------------------------------------------------------------------


def pure_noise(p, model, step):
    """What a release of nothing is in test mode."""
    zeros = {name: torch.zeros_like(q) for name, q in model.named_parameters()}
    book = Ledger.open(None, p.hash, max_releases=1)
    return release(
        ClippedSum(zeros, p.max_grad_norm, p.clipping), p, p.noise_stream(), book, step
    ).gradients


def test_batches_are_used_as_they_are_drawn_and_an_empty_one_is_released():
    """None is drawn again, skipped, or filled up because it came out empty.

    A single row is padded with a row of weight zero, which does not count.
    """
    p, model = plan(expected_batch_size=1, steps=12), net()
    drawn = [p.draw(step, p.sampling_stream()) for step in range(12)]
    assert {0, 1, 2} <= {len(indices) for indices in drawn}
    seen = Heard()

    def counting(m, batch):
        seen.append(len(batch[0]))
        return loss_fn(m, batch)

    optimizer = Handed(model)
    with session(p, model, optimizer, verify=False) as s:
        for step, batch in enumerate(s.batches()):
            seen.clear()
            assert np.array_equal(batch.indices, drawn[step])
            record = s.step(batch, counting)
            assert record.batch_size == len(drawn[step])
            assert sum(seen) == (2 if record.batch_size == 1 else record.batch_size)
            assert s.ledger.count == len(optimizer.handed) == step + 1
            assert s.ledger.releases[step]["step"] == step
            noise = pure_noise(p, model, step)
            same = [torch.equal(optimizer.handed[step][name], noise[name]) for name in noise]
            assert all(same) if len(drawn[step]) == 0 else not any(same)
    assert step == 11


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


# -- clip and divisor against a loop over examples -------------------------------------------------


def rebuilt(settings, model, step):
    """The metric of a refresh, measured again on a copy of the weights: no private example is in
    reach.
    """
    model = copy.deepcopy(model)
    layers = find_layers(model)
    measure = partial(lambda layers, m, loss: capture(m, layers, loss), layers)
    return dict(
        settings.build(
            model, measure, step, rules={layer.name: layer.rule for layer in layers}
        ).metric
    )


def loop_step(model, metric, indices, bound):
    """Gradients of one DP-KFC step without noise by plain autograd; the norms in the metric come
    back.
    """
    x, y = data()
    parameters = dict(model.named_parameters())
    totals = {name: torch.zeros_like(q) for name, q in parameters.items()}
    norms = []
    for i in indices:
        losses = loss_fn(model, (x[i : i + 1], y[i : i + 1]))
        g = dict(
            zip(
                parameters,
                torch.autograd.grad(losses.sum(), list(parameters.values())),
                strict=True,
            )
        )
        rows = {
            k: torch.cat([g[f"{k}.weight"], g[f"{k}.bias"].unsqueeze(1)], 1) for k in ("0", "2")
        }
        z = {k: metric[k].apply(row) if k in metric else row for k, row in rows.items()}
        norms.append(float(torch.sqrt(sum(v.square().sum() for v in z.values()))))
        c = min(1.0, bound / norms[-1])
        for k, v in z.items():
            totals[f"{k}.weight"] += c * v[:, :-1]
            totals[f"{k}.bias"] += c * v[:, -1]
    for name, q in parameters.items():
        q.grad = totals[name] / B
    return norms


@pytest.mark.quick("kfac-1", "kfac-a-None", "identity-3")
@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.parametrize(
    "settings",
    [None, kfac(decay=0.0), kfac(sides="input", every=3, decay=0.0)],
    ids=["identity", "kfac", "kfac-a"],
)
def test_steps_equal_a_loop_with_the_metric_measured_again(settings, size):
    """Nothing but probe and released weights enters a metric, at any refresh; each example is
    clipped by itself, once.
    """
    bound = 0.9
    p = plan(0.0, max_grad_norm=bound, max_physical_batch_size=size, preconditioner=settings)
    mine, theirs = net(), net()
    reference = torch.optim.SGD(theirs.parameters(), 0.5, momentum=0.9)
    metric = {}
    clipped = []
    with session(p, mine, Handed(mine, 0.5, momentum=0.9)) as s:
        for step, batch in enumerate(s.batches()):
            if settings is not None and settings.is_due(step):
                metric = rebuilt(settings, theirs, step)
            norms = loop_step(theirs, metric, batch.indices, bound)
            clipped += [n > bound for n in norms]
            reference.step()
            record = s.step(batch, loss_fn)
            assert record.median_norm == pytest.approx(
                float(torch.tensor(norms).median()), rel=1e-6
            )
            torch.testing.assert_close(weights(mine), weights(theirs), rtol=1e-9, atol=1e-11)
    assert 0 < sum(clipped) < len(clipped)


def test_the_divisor_is_the_expected_size_whatever_was_drawn():
    """One example alone moves the weights by its clipped gradient over B, in a batch of any
    size.
    """
    p, model = plan(0.0, max_grad_norm=1e-3, clipping="flat"), net()
    optimizer = Handed(model)
    x, y = data()
    same = (x[:1].expand(N, WIDTH).contiguous(), y[:1].expand(N).contiguous())
    with session(p, model, optimizer, dataset=same) as s:
        sizes = [s.step(batch, loss_fn).batch_size for batch in s.batches()]
    assert len(set(sizes)) > 1
    found = [float(flat(handed.values()).norm()) for handed in optimizer.handed]
    assert found == pytest.approx([1e-3 * n / B for n in sizes], rel=1e-5)
