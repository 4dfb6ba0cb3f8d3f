"""Beside Opacus 1.6 itself: the same updates, and the same script with only its import changed."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dpkfc.config import PrivacyConfig
from dpkfc.integrations.opacus import PrivacyEngine
from dpkfc.session import Session
from tests.integrations.opacus_cases import (
    FEW_ORDERS,
    B,
    N,
    cnn,
    data,
    kfac,
    loader,
    mlp,
    private,
    scaled,
    sgd,
    train,
    weights,
)

opacus = pytest.importorskip("opacus")


def peer(model: nn.Module, source: DataLoader, max_grad_norm: float, **settings: object):
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
@pytest.mark.parametrize(("build", "shape"), [(mlp, (6,)), (cnn, (1, 8, 8)), (scaled, (6,))])
def test_the_updates_are_those_of_opacus(
    build, shape, max_grad_norm: float, reduction: str
) -> None:
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


SCRIPT = """
from {module} import PrivacyEngine

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
)
optimizer = optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
criterion = nn.CrossEntropyLoss()
train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)

privacy_engine = PrivacyEngine({accountant})
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    epochs=EPOCHS,
    target_epsilon=8.0,
    target_delta=1e-4,
    max_grad_norm=1.0,
)
sigma = optimizer.noise_multiplier

for epoch in range(EPOCHS):
    model.train()
    losses = []
    for images, target in train_loader:
        optimizer.zero_grad()
        output = model(images)
        loss = criterion(output, target)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    scheduler.step()
    epsilon = privacy_engine.get_epsilon(1e-4)

model.eval()
with torch.no_grad():
    accuracy = (model(test_images).argmax(1) == test_target).float().mean().item()
history = len(privacy_engine.accountant)
"""


def run(module: str, accountant: str) -> dict[str, object]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    target = torch.tensor(digits.target)
    train_set = torch.utils.data.TensorDataset(images[:1280], target[:1280])
    names = {"torch": torch, "nn": nn, "optim": torch.optim, "DataLoader": DataLoader, "EPOCHS": 3}
    names |= {"train_set": train_set, "test_images": images[1280:], "test_target": target[1280:]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(SCRIPT.format(module=module, accountant=accountant), "script", "exec"), names)
    return names


@pytest.mark.slow
def test_an_opacus_script_runs_with_only_its_import_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opacus.accountants.RDPAccountant, "DEFAULT_ALPHAS", FEW_ORDERS)
    mine = run("dpkfc.integrations.opacus", "accountant='rdp'")
    theirs = run("opacus", "accountant='rdp'")
    assert mine["history"] == 60
    assert 7.8 < mine["epsilon"] <= 8.0 + 1e-6
    assert theirs["epsilon"] == pytest.approx(mine["epsilon"], rel=0.01)
    assert mine["sigma"] == pytest.approx(theirs["sigma"], rel=0.01)
    assert mine["accuracy"] > 0.6
    assert abs(mine["accuracy"] - theirs["accuracy"]) < 0.15
    assert mine["optimizer"].param_groups[0]["lr"] == pytest.approx(0.5 * 0.9**3)
    assert type(mine["model"]) is nn.Sequential


def test_the_default_accountants_agree() -> None:
    """PRV and PLD compose the same loss; PRV adds its own error of 0.01."""
    engine, model, optimizer, batches = private(noise_multiplier=2.0, test_mode_seed=None)
    train(model, optimizer, batches)
    theirs = opacus.accountants.PRVAccountant()
    theirs.history = [(2.0, B / N, N // B)]
    for delta in (1e-3, 1e-5):
        assert 0 <= theirs.get_epsilon(delta) - engine.get_epsilon(delta) < 0.015


@pytest.mark.quick("kfac-per-layer", "kfac-natural", "plain")
@pytest.mark.parametrize(
    ("preconditioner", "clipping", "readout"),
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
def test_the_steps_are_those_of_a_session(preconditioner, clipping: str, readout: str) -> None:
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
            session.step(
                batch,
                lambda model, b: nn.functional.cross_entropy(model(b[0]), b[1], reduction="none"),
            )
    torch.testing.assert_close(weights(mine), weights(theirs), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_ghost_script_gets_its_four_values() -> None:
    criterion = nn.CrossEntropyLoss()
    model = mlp()
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=sgd(model),
        criterion=criterion,
        data_loader=loader(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
    )
    assert made[0] is model
    assert made[2] is criterion
    assert train(made[0], made[1], made[3], criterion=made[2]) == N // B


def test_a_copy_of_a_private_model_is_ordinary() -> None:
    engine, model, optimizer, batches = private()
    other = copy.deepcopy(model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        nn.functional.cross_entropy(other(x), y).backward()
        loss.backward()
        optimizer.step()
        averaged.update_parameters(model)
    assert len(engine.accountant) == N // B
    assert all(p.grad is not None for p in other.parameters())
