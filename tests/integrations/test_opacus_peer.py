"""Beside Opacus 1.6 itself: the same updates, and the same script with only its import changed."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dpkfc.config import PrivacyConfig
from dpkfc.session import Session
from tests.integrations.opacus_cases import B, N, cnn, data, make_scaled, mlp, private, sgd, train
from tests.mutation_cases import kfac, weights
from tests.sessions import cross_entropy

opacus = pytest.importorskip("opacus")


def peer(model, source, max_grad_norm, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=sgd(model),
            data_loader=source,
            noise_multiplier=0.0,
            max_grad_norm=max_grad_norm,
            poisson_sampling=False,
            **settings,
        )


@pytest.mark.quick("mlp-*-0.3-mean", "mlp-*-sum", "scaled-*-0.3-sum", "cnn-*-0.3-mean")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("max_grad_norm", [1e6, 0.3])
@pytest.mark.parametrize("build, shape", [(mlp, (6,)), (cnn, (1, 8, 8)), (make_scaled, (6,))])
def test_the_updates_are_those_of_opacus(build, shape, max_grad_norm, reduction):
    source = DataLoader(data(shape=shape), batch_size=B)
    mine, theirs = build(), build()
    start = weights(mine)
    settings = {"max_grad_norm": max_grad_norm, "loss_reduction": reduction}
    _, mine, my_optimizer, batches = private(mine, data_loader=source, **settings)
    theirs, their_optimizer, _ = peer(theirs, source, **settings)
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    for x, y in batches:
        if not len(x):
            continue
        for model, optimizer in ((mine, my_optimizer), (theirs, their_optimizer)):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    moved = (weights(mine) - start).norm()
    assert moved > 1e-3
    # Opacus clips by C / (norm + 1e-6); the bound on a norm is a little above it here.
    assert (weights(mine) - weights(theirs)).norm() < 3e-4 * moved
    if max_grad_norm == 1e6:
        torch.testing.assert_close(weights(mine), weights(theirs), rtol=1e-9, atol=1e-11)


@pytest.mark.quick("kfac-per-layer", "kfac-natural", "plain")
@pytest.mark.parametrize(
    "preconditioner, clipping, readout",
    [
        (None, "flat", "whitened"),
        (None, "per_layer", "whitened"),
        (kfac(), "flat", "whitened"),
        (kfac(), "per_layer", "whitened"),
        (kfac(), "flat", "natural"),
        (kfac(sides="both"), "per_layer", "inverse"),
    ],
    ids=[
        "plain",
        "plain-per-layer",
        "kfac",
        "kfac-per-layer",
        "kfac-natural",
        "kfac-inverse",
    ],
)
def test_the_steps_are_those_of_a_session(preconditioner, clipping, readout):
    """One seed, one order, one noise: engine and session release the same."""
    mine, theirs = mlp(), mlp()
    noise = 0.7
    _, mine, optimizer, batches = private(
        mine,
        noise_multiplier=noise,
        preconditioner=preconditioner,
        clipping=clipping,
        readout=readout,
    )
    assert train(mine, optimizer, batches) == N // B
    config = PrivacyConfig(
        expected_batch_size=B,
        steps=N // B,
        preconditioner=preconditioner,
        clipping=clipping,
        readout=readout,
        test_mode_seed=3,
    )
    x, y = data().tensors
    with Session(config.with_noise(noise, 1e-4, N), theirs, sgd(theirs), (x, y)) as session:
        for batch in session.batches():
            session.step(batch, cross_entropy)
    torch.testing.assert_close(weights(mine), weights(theirs), rtol=1e-9, atol=1e-12)
